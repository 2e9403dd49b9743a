"""Multimodal models with random weights, in the architectures of the hub."""

import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoTokenizer

from helpers.models import disturb

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.08,
}  # fmt: skip
SEEN = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4}
QWEN = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
LINEAR = {
    f"linear_{name}": size for name, size in {"key_head_dim": 64, "value_head_dim": 64, "num_key_heads": 2}.items()
}
LINEAR |= {
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": 3 * ["linear_attention"] + ["full_attention"],
}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"hidden_size_per_layer_input": 8, "global_head_dim": 64, "num_kv_shared_layers": 0}
FAMILIES = {  # configuration, text, images
    "qwen3_5": (transformers.Qwen3_5Config, LINEAR, QWEN),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, MROPE, QWEN | {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (transformers.Qwen3VLConfig, MROPE, QWEN | {"deepstack_visual_indexes": [0]}),
    "gemma3": (transformers.Gemma3Config, WINDOW | {"query_pre_attn_scalar": 32}, SEEN | {"image_size": 16}),
    "gemma4": (
        transformers.Gemma4Config,
        WINDOW | PER_LAYER | {"final_logit_softcapping": 2.0},
        SEEN | {"head_dim": 16, "num_key_value_heads": 2},
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {"model_type": "mistral"},
        SEEN | {"model_type": "pixtral", "image_size": 16},
    ),
}


def made(family: str, folder, toy) -> str:
    """Save a multimodal model with random weights and the tokenizer of the tests."""
    tokenizer = AutoTokenizer.from_pretrained(toy)
    make, text, images = FAMILIES[family]
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if family == "gemma4":
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    torch.manual_seed(0)
    config = make(text_config=TEXT | text | sizes, vision_config=images, eos_token_id=tokenizer.eos_token_id)
    model = AutoModelForImageTextToText.from_config(config)
    disturb(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
