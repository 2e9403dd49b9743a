"""Small models with random weights of the architectures that people train, and what is exact for each of them.

`PYTHONPATH=.:tests python -m helpers.architectures` prints the table of tests/data/architectures.md.
"""

import re
import sys
from copy import deepcopy

import torch
import transformers
from peft import LoraConfig
from torch import Tensor, nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.padded import PaddedCache
from grpo.engines.weights import checkpoint
from grpo.extras.scores.door import follow_scores
from grpo.models.packing import trusted
from grpo.models.policy import with_adapter
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError
from helpers.models import agree, batch_of, disturb, gap_now, measured

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.1, "eos_token_id": 1,
    "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32}
GEMMA = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0}
MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
ARCHITECTURES: dict[str, tuple[str, dict]] = {  # name: configuration, what differs from SHAPE
    "Llama": ("LlamaConfig", {}),
    "Llama 3.1": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Qwen 2": ("Qwen2Config", {}),
    "Qwen 3": ("Qwen3Config", {}),
    "Qwen 2 MoE": ("Qwen2MoeConfig", EXPERTS | SHARED),
    "Qwen 3 MoE": ("Qwen3MoeConfig", EXPERTS),
    "Qwen3-Next": ("Qwen3NextConfig", LINEAR | EXPERTS | SHARED),
    "Qwen 3.5, text": ("Qwen3_5TextConfig", LINEAR),
    "Qwen 3.5 MoE, text": ("Qwen3_5MoeTextConfig", LINEAR | EXPERTS | SHARED),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "Gemma 3, text": ("Gemma3TextConfig", WINDOW | {"query_pre_attn_scalar": 16}),
    "Gemma 3n, text": (
        "Gemma3nTextConfig",
        WINDOW | GEMMA | {"laurel_rank": 4, "intermediate_size": [96, 96], "activation_sparsity_pattern": [0.0, 0.0]},
    ),
    "Gemma 4, text": ("Gemma4TextConfig", WINDOW | GEMMA | {"global_head_dim": 32}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Ministral 3": ("Ministral3Config", {}),
    "Mixtral": ("MixtralConfig", LOCAL),
    "Phi-3": ("Phi3Config", {}),
    "Phi-3.5 MoE": ("PhimoeConfig", LOCAL),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", WINDOW),
    "OLMoE": ("OlmoeConfig", EXPERTS),
    "SmolLM 3": ("SmolLM3Config", {}),
    "Granite SWA": ("GraniteSWAConfig", WINDOW | {"logits_scaling": 8.0}),
    "Granite MoE SWA": ("GraniteMoeSWAConfig", WINDOW | LOCAL | {"logits_scaling": 4.0}),
    "MiMo V2 Flash": ("MiMoV2FlashConfig", WINDOW | ROUTED),
    "VaultGemma": ("VaultGemmaConfig", WINDOW | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gpt-oss": ("GptOssConfig", WINDOW | LOCAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "DeepSeek V2": ("DeepseekV2Config", MLA | ROUTED),
    "DeepSeek V3": ("DeepseekV3Config", MLA | ROUTED),
    "Granite": ("GraniteConfig", {"logits_scaling": 8.0}),
    "Granite MoE": ("GraniteMoeConfig", LOCAL | {"logits_scaling": 4.0}),
    "Granite 4": (
        "GraniteMoeHybridConfig",
        LOCAL | MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "LFM 2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "LFM 2 MoE": ("Lfm2MoeConfig", EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "Kimi Linear": (
        "KimiLinearConfig",
        MLA | LOCAL | {"q_lora_rank": None, "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
                       "linear_head_dim": 16, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "OLMo Hybrid": ("OlmoHybridConfig", LINEAR),
    "Falcon Mamba": ("FalconMambaConfig", {"state_size": 8}),
    "Mamba": ("MambaConfig", {"state_size": 8}),
    "Mamba 2": ("Mamba2Config", {"num_heads": 8, "n_groups": 1, "state_size": 8, "expand": 2, "head_dim": 16}),
    "Falcon-H1": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 128}),
    "Nemotron-H": (
        "NemotronHConfig",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 8,
         "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
    ),
    "Bamba": ("BambaConfig", MAMBA | {"attn_layer_indices": [1]}),
    "Jamba": (
        "JambaConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    ),
    "RecurrentGemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 64}),
    "Cohere": ("CohereConfig", {"logit_scale": 0.0625}),
    "Cohere 2": ("Cohere2Config", {"logit_scale": 0.0625, "sliding_window": 6, "layer_types": WINDOW["layer_types"]}),
    "GLM 4": ("Glm4Config", {}),
    "GLM 4.5": ("Glm4MoeConfig", ROUTED | {"n_group": 1}),
    "GLM 4.7 Flash": ("Glm4MoeLiteConfig", MLA | ROUTED),
    "MiniMax": ("MiniMaxConfig", LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    "MiniMax M2": ("MiniMaxM2Config", LOCAL),
    "MiniMax M3, text": (
        "MiniMaxM3VLTextConfig",
        LOCAL | {"num_hidden_layers": 4, "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "rotary_dim": 8,
                 "dense_intermediate_size": 64, "shared_intermediate_size": 32, "intermediate_size": 32, "index_n_heads": 2,
                 "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 3},
    ),
    "Llama 4, text": (
        "Llama4TextConfig",
        LOCAL | {"intermediate_size_mlp": 96, "num_experts_per_tok": 1, "attention_chunk_size": 64,
                 "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "EXAONE 4": ("Exaone4Config", WINDOW),
    "Seed-OSS": ("SeedOssConfig", {}),
    "ERNIE 4.5": ("Ernie4_5Config", {}),
    "ERNIE 4.5 MoE": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "Hunyuan": ("HunYuanDenseV1Config", {}),
    "Arcee": ("ArceeConfig", {}),
    "Apertus": ("ApertusConfig", {}),
    "StarCoder 2": ("Starcoder2Config", {}),
    "StableLM": ("StableLmConfig", {}),
    "Nemotron": ("NemotronConfig", {}),
    "DiffLlama": ("DiffLlamaConfig", {}),
    "Doge": ("DogeConfig", {}),
    "Helium": ("HeliumConfig", {}),
    "BitNet": ("BitNetConfig", {}),
    "GPT-2": ("GPT2Config", GPT2),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BLOOM": ("BloomConfig", {"n_head": 4, "n_layer": 2}),
    "Falcon RW": ("FalconConfig", {"head_dim": ..., "multi_query": False, "alibi": True, "bias": True, "parallel_attn": False}),
    "Falcon 2": ("FalconConfig", {"head_dim": ..., "new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon": ("FalconConfig", {"head_dim": ..., "new_decoder_architecture": False, "multi_query": True}),
    "RWKV": ("RwkvConfig", {}),
    "dots.1": ("Dots1Config", ROUTED),
    "AFMoE": ("AfmoeConfig", WINDOW | EXPERTS | {"num_dense_layers": 1}),
    "nanochat": ("NanoChatConfig", {}),
    "LongCat Flash": (
        "LongcatFlashConfig",
        MLA | ROUTED | {"num_layers": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "zero_expert_num": 2,
                        "moe_topk": 2},
    ),
    "DeepSeek V3.2": ("DeepseekV32Config", MLA | ROUTED | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}),
}  # fmt: skip


follow_scores()


def made(name: str, **own) -> nn.Module:
    """Return a model of that architecture, in float32 and evaluation mode. own: sizes in place of those of the table."""
    config, more = ARCHITECTURES[name]
    sizes = {key: value for key, value in (SHAPE | more | own).items() if value is not ...}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes)).eval()
    disturb(model, seed=1)
    return model


@torch.no_grad()
def alone(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return log-probabilities [B, C] by plain forward passes, one row at a time; 0 where nothing was sampled."""
    found, width, before = torch.zeros(batch.mask.shape), batch.mask.shape[1], model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # transformers' attention by sdpa leaves caps out
    for row in range(len(batch)):
        real = batch.attention_mask[row].bool()
        ids = batch.ids[row, real]
        logprobs = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        own = int(real[-width:].sum())
        found[row, :own] = logprobs[-own:]
    model.config._attn_implementation = before
    return found * batch.mask


def layout_of(model: nn.Module, batch: TokenBatch) -> str:
    """Return the layout that a run takes; its log-probabilities and gradients are exact. Raises UserError where none is."""
    layout, _ = trusted(model, "shared_prompt")
    logprobs, _, gradients = measured(model, batch, "padded")
    assert (logprobs - alone(model, batch)).abs().max() < 1e-5
    without = {name for name, p in model.named_parameters() if p.requires_grad and name not in gradients}
    assert all(".indexer." in name for name in without)  # DeepSeek V3.2 chooses with it which tokens to see
    if layout != "padded":
        agree(model, batch, layout)
    return layout


def cache_of(model: nn.Module) -> str:
    """Return how the built-in engine samples; its log-probabilities are exact. Raises UserError if it does not."""
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    assert gap_now(engine, model) < 5e-5  # Nemotron-H: 2.6e-5, since its states are summed in another order
    return "whole rows" if engine.cache is PaddedCache else "KV cache"


def adapted(model: nn.Module, batch: TokenBatch) -> str:
    """Return what the default LoRA needs. Its gradients and its merged weights are right."""

    def policy(**more) -> nn.Module:
        return with_adapter(
            deepcopy(model), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", **more)
        )

    try:
        said, lora = "yes", policy()
    except UserError as error:
        [names] = re.findall(r"set \+adapter\.exclude_modules=\[(.*)\]$", str(error))
        said, lora = f"`+adapter.exclude_modules=[{names}]`", policy(exclude_modules=names.split(","))
    disturb(lora, seed=2)
    _, _, gradients = measured(lora, batch, "padded")
    assert gradients and all("lora_" in name for name in gradients)
    merged = deepcopy(lora).merge_and_unload().state_dict()
    found = dict(checkpoint(lora))
    assert {*found} == {name for name, _ in checkpoint(model)}
    assert all(torch.equal(tensor, merged[name]) for name, tensor in found.items())
    experts = {name for name, p in lora.named_parameters() if p.ndim == 3 and ".experts." in name}
    return said + ", without its experts" if any(".base_layer." not in name for name in experts) else said


def place(name: str) -> tuple[str, str]:
    """Return the beginning of the architecture's row in the table, and what the last cell of the row has for it."""
    model, batch = made(name), batch_of([(9, [5, 8, 1]), (4, [2, 6])])
    entry = f"{name} (`{ARCHITECTURES[name][0]}`)"
    try:
        layout = layout_of(model, batch)
    except UserError as error:
        assert "computes a padded row otherwise than the row alone" in str(error)
        return "| refused: its padded rows are wrong | | |", entry
    try:
        cache = cache_of(model)
    except UserError as error:
        assert "set engine=vllm" in str(error)
        cache = "refused: `engine=vllm`"
    return f"| {layout} | {cache} | {adapted(model, batch)} |", entry


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    rows: dict[str, list[str]] = {}
    for start, entry in map(place, sys.argv[1:] or ARCHITECTURES):
        rows.setdefault(start, []).append(entry)
    for start, entries in rows.items():
        print(f"{start} {'; '.join(entries)} |")
