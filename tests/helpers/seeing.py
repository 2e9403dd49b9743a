"""Tiny models that see, with random weights and processors of their own, as folders in the form of the hub."""

import json
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from grpo.env.pictures import Picture
from helpers.models import disturb

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.08,
}  # fmt: skip
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
QWEN = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
PROCESSORS = {
    "qwen": ("Qwen2_5_VLProcessor", {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}}),
    "idefics3": ("Idefics3Processor", {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56}, "do_image_splitting": True, "do_normalize": False}),
    "mistral3": ("PixtralProcessor", {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56},
        "patch_size": 14}),
    "gemma3": ("Gemma3Processor", {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}}),
}  # fmt: skip
KINDS = {  # configuration, processor, the text of a picture in a template
    "qwen2_5_vl": (
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "vision_config": QWEN | {"fullatt_block_indexes": [1], "window_size": 56},
        },
        "qwen",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": (
        {
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                }
            },
            "vision_config": QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        },
        "qwen",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "idefics3": (
        {"text_config": {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 2},
        "idefics3",
        "<image>",
    ),
    "mistral3": (
        {
            "text_config": {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
            "spatial_merge_size": 2,
        },
        "mistral3",
        "[IMG]",
    ),
    "gemma3": (
        {
            "text_config": {
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            "vision_config": TOWER | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        "gemma3",
        "<start_of_image>",
    ),
}
TOKENS = [
    "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<image>", "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)), "<end_of_utterance>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>",
]  # fmt: skip
REPEATED = {"qwen": "<|image_pad|>", "idefics3": "<image>", "mistral3": "[IMG]", "gemma3": "<image_soft_token>"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def made(kind: str, folder: Path, toy: Path, head_dim: int = 16) -> str:
    """Save a model that sees, its tokenizer and its processor. head_dim: a multiple of 16; vLLM needs 32."""
    settings, processor, shown = KINDS[kind]
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", shown)
    if processor == "gemma3":
        names = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
        tokenizer = with_names(tokenizer, names, folder)
    else:
        tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "bos_token_id": None}
    repeated = tokenizer.convert_tokens_to_ids(REPEATED[processor])
    ids = {
        "image_token_id": repeated,
        "image_token_index": repeated,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    ids |= {"vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>")}
    settings, sizes = deepcopy(settings), {"head_dim": head_dim, "hidden_size": 4 * head_dim}
    if "out_hidden_size" in settings["vision_config"]:
        settings["vision_config"]["out_hidden_size"] = 4 * head_dim
    text = TEXT | {"vocab_size": len(tokenizer)} | ends | settings["text_config"] | sizes
    if rope := text.get("rope_parameters"):
        rope["mrope_section"] = [size * head_dim // 16 for size in rope["mrope_section"]]
    config = AutoConfig.for_model(
        kind, **settings | {"text_config": text} | ids | ends | {"tie_word_embeddings": False}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    disturb(model, seed=0)
    model.save_pretrained(folder)
    name, images = PROCESSORS[processor]
    Path(folder, "preprocessor_config.json").write_text(json.dumps(images | {"processor_class": name}))
    own = {
        "idefics3": {"image_seq_len": 4},
        "mistral3": {"patch_size": 14, "spatial_merge_size": 2},
        "gemma3": {"image_seq_length": 4},
    }
    Path(folder, "processor_config.json").write_text(json.dumps(own.get(processor, {}) | {"processor_class": name}))
    return str(folder)


def with_names(tokenizer, names: dict[str, str], folder: Path):
    """Save a tokenizer with named special tokens, and return it as it is loaded."""
    tokenizer.save_pretrained(folder)
    file = Path(folder, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | names | {"extra_special_tokens": names}))
    return AutoTokenizer.from_pretrained(folder)


def drawn(width: int, height: int, seed: int) -> Picture:
    """Return a picture of noise."""
    numbers = torch.randint(
        256, (width * height * 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    file = BytesIO()
    Image.frombytes("RGB", (width, height), bytes(numbers.tolist())).save(file, "PNG")
    return Picture(file.getvalue())


def plain(width: int, height: int, colour: tuple[int, int, int]) -> Picture:
    """Return a picture of one colour."""
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return Picture(file.getvalue())
