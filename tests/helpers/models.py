"""Shared by the tests of engines: small random models of several families, and the gap between engine and trainer."""

from pathlib import Path

import torch
import transformers
from peft import LoraConfig

from grpo.engines.protocol import Engine, Sampling
from grpo.env.tokens import Completion
from grpo.models.logprobs import completion_logprobs
from grpo.models.policy import with_adapter
from grpo.objectives.batch import TokenBatch

CONTEXT = 512
TOY = Path(__file__).parents[1] / "data" / "toy"
PROMPTS = [[60, 61, 62], [63, 64, 65, 66, 67, 68, 69], [70, 71]]
SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "initializer_range": 0.08,
    "eos_token_id": 1,
}  # fmt: skip
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOY)
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


GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}


MORE = {
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 6, "final_logit_softcapping": 2.0}),
    "mistral, window 6": (transformers.MistralConfig, {"sliding_window": 6}),
    "gpt2": (transformers.GPT2Config, GPT2),
    "neox": (transformers.GPTNeoXConfig, {}),
    "granite": (transformers.GraniteConfig, {"logits_scaling": 8.0}),
    "granite_moe": (transformers.GraniteMoeConfig, {"logits_scaling": 4.0, "num_local_experts": 4}),
    "cohere2": (transformers.Cohere2Config, {"logit_scale": 0.0625, "sliding_window": 6}),
}


def model_of(family: str, lora: bool = False) -> torch.nn.Module:
    make, more = {**FAMILIES, **MORE}[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**SHAPE | more, vocab_size=97)).eval()
    disturb(model, seed=1)
    if lora:
        kinds = ["c_attn", "c_proj"] if family == "gpt2" else "all-linear"
        model = with_adapter(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=kinds))
        disturb(model, seed=2)
    return model


def batch_of(sizes: list[tuple[int, list[int]]], turns: bool = True) -> TokenBatch:
    """Return random tokens. sizes: the length of each prompt and of its rows. Every third token of a long row is a tool's."""
    generator = torch.Generator().manual_seed(3)
    prompt_width, width = max(prompt for prompt, _ in sizes), max(max(own) for _, own in sizes)
    ids, real, mask = [], [], []
    for prompt, own in sizes:
        start = torch.randint(2, 97, (prompt_width,), generator=generator)
        for length in own:
            ids.append(torch.cat([start, torch.randint(2, 97, (width,), generator=generator)]))
            of_row = torch.arange(prompt_width + width)
            real.append(((of_row >= prompt_width - prompt) & (of_row < prompt_width + length)).long())
            sampled = torch.arange(width) < length
            mask.append(sampled & (torch.arange(width) % 3 != 2) if turns and length > 4 else sampled)
    ids, real, mask = torch.stack(ids), torch.stack(real), torch.stack(mask)
    return TokenBatch(ids * real, real, mask, torch.zeros(mask.shape), torch.arange(len(ids)))


SIZES = [(9, [5, 8, 1, 3]), (4, [2, 6]), (12, [7]), (1, [4, 4, 4])]


def measured(model, batch: TokenBatch, layout: str, kernel=None, entropies: bool = False):
    """Return log-probabilities, entropies, and the gradients of a loss that weights every token differently."""
    model.zero_grad()
    logprobs, entropy = completion_logprobs(model, batch, 0.8, entropies, layout, kernel)
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    loss = (weights * logprobs).sum() + (weights.flip(0) * entropy).sum() * entropies
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), entropy.detach(), gradients


def agree(model, batch, layout, kernel=None, entropies=False) -> None:
    # of a gated delta rule the gradients in every layout, and of rows alone, are up to 2.4e-5 from those in float64
    rough = any(type(module).__name__.endswith("DeltaNet") for module in model.modules())
    expected = measured(model, batch, "padded", entropies=entropies)
    got = measured(model, batch, layout, kernel, entropies)
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=0)
    assert got[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        scale = float(gradient.abs().max().clamp(min=1))
        torch.testing.assert_close(
            got[2][name] / scale, gradient / scale, atol=3e-5 if rough else 1e-5, rtol=0, msg=name
        )


BOUND = {
    torch.float32: 1e-5,
    torch.bfloat16: 0.1,
}  # largest allowed gap; bfloat16 keeps 8 bits, and logits here are near 4
