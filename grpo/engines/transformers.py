"""Layer 1 - the built-in engine: samples from the very model that is trained, so there are no weights to copy.

Each distinct prompt is read once and its cache expanded to the group; finished rows leave the batch. Works wherever the
model works: CPU, MPS, one GPU.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo.engine import Sampling
from grpo.errors import UserError
from grpo.tokens import Completion


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf where top-k, top-p (on what top-k left) or min-p forbids a token. logits: [B, V]. Returns [B, V].

    top-p keeps the smallest set of most likely tokens that reaches top_p, min-p those at least min_p times as likely as
    the likeliest (arXiv 2407.01082).
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """The logits of tokens that were there before made smaller, see `Sampling`. logits: [B, V]; seen: [B, V] bool."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """The token whose slice of the cumulative distribution holds `uniform`. logits: [B, V]; uniform: [B] in [0, 1).

    One number a row decides, so a row's draw depends on its own seed only. It sums in the precision of `uniform`: float64
    where the device has it, for the sake of large vocabularies. Returns [B] int64.
    """
    cumulative = logits.softmax(-1).cumsum(-1, dtype=uniform.dtype)
    threshold = uniform[:, None] * cumulative[:, -1:]  # rounding leaves the sum a little off 1
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


class TransformersEngine:
    """max_rows bounds the rows generated side by side, and so the memory of the cache."""

    def __init__(self, max_rows: int = 256) -> None:
        if max_rows < 1:
            raise UserError(f"engine.max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self.version: int | None = None
        self.model: nn.Module | None = None

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def load_weights(self, model: nn.Module, version: int) -> None:
        self.model, self.version = model, version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        if sampling.guided:
            raise UserError("sampling.guided: the built-in engine cannot guide what it samples: set engine=vllm")
        longest = max(map(len, prompts))
        if longest + sampling.max_tokens > self.context:
            raise UserError(
                f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens} exceed the model's context of "
                f"{self.context}: lower max_tokens, or take shorter prompts"
            )
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.max_rows):
            piece = slice(start, start + self.max_rows)
            tell = done and (lambda i, completion, start=start: done(start + i, completion))
            completions += self._sample(prompts[piece], sampling, seeds[piece], tell)
        return completions

    @torch.no_grad()
    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        tell: Callable[[int, Completion], None] | None,
    ) -> list[Completion]:
        model, device = self.model, self.model.device
        eos = model.generation_config.eos_token_id
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        stop_ids = torch.tensor([*eos, *sampling.stop_ids], dtype=torch.int64, device=device)
        precision = torch.float32 if device.type == "mps" else torch.float64
        uniform = torch.stack(
            [
                torch.rand(sampling.max_tokens, generator=torch.Generator().manual_seed(seed), dtype=precision)
                for seed in seeds
            ]
        ).to(device)  # [B, max_tokens]

        # Prefill: U distinct prompts, padded on the left, then one row a sample.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        place = {prompt: i for i, prompt in enumerate(distinct)}
        sample_of = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
        width = max(map(len, distinct))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in distinct], device=device)  # [U, P]
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=device)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        logits = model(
            ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1][sample_of]  # [B, V]
        cache.batch_select_indices(sample_of)
        seen = None  # [B, V], where tokens that were there before count
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(distinct), logits.shape[-1], dtype=torch.bool, device=device)
            for i, prompt in enumerate(distinct):
                seen[i, list(prompt)] = True
            seen = seen[sample_of]
        attention, positions = attention[sample_of], positions[sample_of, -1:]

        rows = torch.arange(len(prompts), device=device)  # which sample each row of the shrinking batch is
        tokens = torch.zeros(len(prompts), sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(len(prompts), sampling.max_tokens, device=device)
        completions: list[Completion | None] = [None] * len(prompts)

        def finish(ended: Tensor, length: int, reason: Literal["stop", "length"]) -> None:
            columns = tokens[ended, :length].tolist(), logprobs[ended, :length].tolist()
            for i, ids, values in zip(ended.tolist(), *columns, strict=True):
                completions[i] = Completion(tuple(ids), tuple(values), reason)
                if tell is not None:
                    tell(i, completions[i])

        for t in range(sampling.max_tokens):
            scaled = logits.float() / (sampling.temperature or 1.0)
            wanted = scaled if seen is None else penalize(scaled, seen[rows], sampling.repetition_penalty)
            greedy = sampling.temperature == 0
            token = wanted.argmax(-1) if greedy else draw(filter_logits(wanted, sampling), uniform[rows, t])
            tokens[rows, t] = token
            if seen is not None:
                seen[rows, token] = True
            logprobs[rows, t] = scaled.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
            done = torch.isin(token, stop_ids)
            if done.any():
                finish(rows[done], t + 1, "stop")
            if done.all() or t + 1 == sampling.max_tokens:
                break
            if done.any():
                keep = (~done).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                rows, token, attention, positions = rows[keep], token[keep], attention[keep], positions[keep]
            attention = torch.cat([attention, attention.new_ones(len(rows), 1)], dim=1)
            positions = positions + 1
            logits = model(
                token[:, None], attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits[:, -1]
        if not done.all():
            finish(rows[~done], sampling.max_tokens, "length")
        return completions

    def close(self) -> None:
        self.model = None
