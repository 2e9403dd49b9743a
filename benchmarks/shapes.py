"""Shared by the benchmarks: Llamas of several sizes with random weights, rows of random tokens, the arithmetic of a pass.

A group is (tokens of the prompt, [tokens of each answer]).
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from grpo.extras.kernels.on_cpu import projected
from grpo.models.head import ONEDNN
from grpo.objectives.batch import TokenBatch

Group = tuple[int, list[int]]

TRL = {  # settings of GRPOConfig: on a CPU in float32, with our optimizer, and nothing shown or saved
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "adam_beta2": 0.99,
}
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 2, 2, 1, 128),
    "1m": (192, 512, 3, 6, 2, 1024),
    "3m": (256, 688, 4, 8, 4, 128),
    "10m": (384, 1024, 6, 12, 4, 128),
    "30m": (640, 1728, 6, 20, 4, 128),
    "100m": (768, 2048, 14, 12, 4, 8192),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}


def llama(name: str, **more) -> LlamaConfig:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": name != "8b",
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return LlamaConfig(**shape | more)


def model_of(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def batch_of(groups: Sequence[Group], vocabulary: int) -> TokenBatch:
    """Return padded rows in which every token of an answer is sampled."""
    generator = torch.Generator().manual_seed(0)
    prompt_width, width = max(prompt for prompt, _ in groups), max(max(answers) for _, answers in groups)
    ids, real = [], []
    for prompt, answers in groups:
        start = torch.randint(vocabulary, (prompt_width,), generator=generator)
        for answer in answers:
            ids.append(torch.cat([start, torch.randint(vocabulary, (width,), generator=generator)]))
            place = torch.arange(prompt_width + width)
            real.append((place >= prompt_width - prompt) & (place < prompt_width + answer))
    ids, real = torch.stack(ids), torch.stack(real)
    mask = real[:, prompt_width:]
    return TokenBatch(ids * real, real.long(), mask, torch.zeros(mask.shape), torch.arange(len(ids)))


def forward_flops(config: PretrainedConfig, groups: Sequence[Group]) -> float:
    """Return the operations of a forward pass that computes every prompt once; a backward pass takes twice as many."""
    return sum(flops_of_parts(config, groups))


def flops_of_parts(config: PretrainedConfig, groups: Sequence[Group]) -> tuple[float, float]:
    """Return the operations of a forward pass in matrix products, 2 for each weight and token, and in attention, 4 for each pair
    of tokens and channel. An answer's last token predicts nothing; only sampled tokens reach the head."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    q, kv = heads * width, config.num_key_value_heads * width
    weights = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * config.intermediate_size)
    tokens = sum(prompt + sum(answers) - len(answers) for prompt, answers in groups)
    pairs = sum(
        prompt * (prompt + 1) / 2 + sum((n - 1) * (prompt + n / 2) for n in answers) for prompt, answers in groups
    )
    said = sum(sum(answers) for _, answers in groups)
    return 2 * weights * tokens + 2 * hidden * config.vocab_size * said, 4 * layers * q * pairs


def matrix_shapes(config: LlamaConfig) -> list[tuple[int, int]]:
    """Return [inputs, outputs] of each matrix product in a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    return 2 * [(hidden, hidden), (hidden, kv), (hidden, inner)] + [(inner, hidden)]


def operations_in_a_second(config: LlamaConfig) -> float:
    """Return how many operations this machine now does in a CPU second: float32 products of 1024 rows in the shapes of a layer,
    each by the faster of MKL and oneDNN."""
    ways = [lambda x, weight: torch.mm(x, weight.T), projected if ONEDNN else F.linear]
    work = seconds = 0.0
    for wide, out in matrix_shapes(config):
        x, weight = torch.randn(1024, wide), torch.randn(out, wide)
        work += 2 * x.numel() * out
        seconds += min(median(timed(way, x, weight) for _ in range(15)) for way in ways)
    return work / seconds


def timed(way: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    begun = time.process_time()
    way(x, weight)
    return time.process_time() - begun
