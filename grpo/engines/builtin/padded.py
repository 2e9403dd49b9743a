"""Sampling with the cache of transformers, for models with special attention or with a recurrent state.

It is slower than `KVCache` and equally correct: prompts are padded on the left, and all samples of a wave end
before the next wave begins.
"""

import inspect
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo.models.adapted import without_adapter
from grpo.system.memory import sent


class PaddedCache:
    """Used like `KVCache`. bound: largest number of rows in a wave times the tokens of its longest; one row
    may exceed it."""

    def __init__(self, model: nn.Module, prompts: Sequence[tuple[int, ...]], max_tokens: int, bound: int) -> None:
        self.model, self.prompt_of, self.max_tokens, self.bound = model, prompts, max_tokens, bound
        names = inspect.signature(without_adapter(model).forward).parameters
        self.cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self.count = 0

    def admit(self, waiting: deque[int]) -> tuple[list[int], Tensor | None]:
        """Take the next wave from `waiting` once no row is left. Returns its samples and their prompts' last
        logits, [B, V]."""
        wave: list[int] = []
        width = 0
        while waiting and not self.count:
            longest = max(width, len(self.prompt_of[waiting[0]]))
            if wave and (len(wave) + 1) * (longest + self.max_tokens) > self.bound:
                break
            width = longest
            wave.append(waiting.popleft())
        if not wave:
            return [], None
        self.count, device = len(wave), self.model.device
        distinct = list(dict.fromkeys(self.prompt_of[i] for i in wave))
        ids = sent(torch.tensor([[0] * (width - len(p)) + list(p) for p in distinct]), device)  # [U, P]
        mask = sent(torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct]), device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.model.config)
        self.mask = mask
        last = torch.full((1,), -1, device=device)  # a slice would copy a frozen head: see logprobs.padded
        logits = self.forward(ids, positions, logits_to_keep=last)
        of = sent(torch.tensor([distinct.index(self.prompt_of[i]) for i in wave]), device)  # [B]
        self.cache.reorder_cache(of)
        self.mask, self.positions = mask[of], positions[of, -1:]
        return wave, logits[of]

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to every row. tokens: [B]. Returns the logits after it, [B, V]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.positions = self.positions + 1
        return self.forward(tokens[:, None], self.positions)

    def forward(self, ids: Tensor, positions: Tensor, **kwargs) -> Tensor:
        """Return the logits after the last token of each row, [n, V]. ids, positions: [n, T]."""
        kwargs[self.cache_name] = self.cache
        if self.cache_name == "past_key_values" or len(ids[0]) > 1:  # a state's step has no padding
            kwargs["attention_mask"] = self.mask
        return self.model(input_ids=ids, position_ids=positions, use_cache=True, **kwargs).logits[:, -1]

    def drop(self, ended: Collection[int]) -> list[int]:
        """Remove these rows. Returns the new order: row i was row order[i]."""
        order = [b for b in range(self.count) if b not in ended]
        self.count = len(order)
        if order:
            keep = sent(torch.tensor(order), self.mask.device)
            self.cache.reorder_cache(keep)
            self.mask, self.positions = self.mask[keep], self.positions[keep]
        return order
