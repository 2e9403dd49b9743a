"""Shared by the tests of engines: small random models of several families, and the gap between engine and trainer."""

from pathlib import Path

import torch
import transformers

from grpo.apps.demo_model import make_tokenizer
from grpo.engines.protocol import Engine, Sampling
from grpo.env.tokens import Completion

CONTEXT = 512
PROMPTS = [[60, 61, 62], [63, 64, 65, 66, 67, 68, 69], [70, 71]]
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.08,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {"query_pre_attn_scalar": 32}),
    "phi3": (transformers.Phi3Config, {"pad_token_id": 0}),  # one matrix for query, key and value, one for gate and up
}


def model_folder(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Save a model of that family, with random weights and biases, and a tokenizer in a folder that vLLM and transformers
    read."""
    make, more = FAMILIES[family]
    tokenizer = make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**SHAPE | more, vocab_size=len(tokenizer)), dtype=dtype)
    disturb(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def disturb(model: torch.nn.Module, seed: int, size: float = 0.02) -> None:
    """Change every trainable weight a little."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def steps(model: torch.nn.Module, count: int = 3, lr: float = 1e-2):
    """Take optimizer steps on PROMPTS; yield after each. AdamW moves weights by about lr, so a stale engine shows."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(count):
        ids = torch.tensor([(prompt * 4)[:8] for prompt in PROMPTS])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def gap(model: torch.nn.Module, prompts: list, completions: list[Completion], temperature: float = 1.0) -> float:
    """Return the largest |engine - transformers| over the sampled tokens."""
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = next_logits(model, prompt, completion).float() / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        gaps.append((expected - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)


@torch.no_grad()
def next_logits(model: torch.nn.Module, prompt: list, completion: Completion) -> torch.Tensor:
    """Return logits [T, V]; token t was drawn from row t."""
    ids = torch.tensor([[*prompt, *completion.ids]])
    return model(ids).logits[0, len(prompt) - 1 : -1]


def gap_now(engine: Engine, model: torch.nn.Module, max_tokens: int = 16) -> float:
    """Return the gap between what the engine samples now and the model's present weights."""
    return gap(model, PROMPTS, engine.sample(PROMPTS, Sampling(max_tokens), seeds=[1, 2, 3]))
