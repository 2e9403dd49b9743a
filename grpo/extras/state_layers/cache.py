"""A KV cache for models whose layers carry a state: that after a prompt is computed once, and copied for each of its samples.

A convolution carries its last tokens on, a scan its state. A model calls these functions in the same order in each pass, and
their number in it tells them apart.

Shapes: B rows (unfinished samples), D channels.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo.engines.builtin.kv_cache import KVCache, Prefill
from grpo.extras.state_layers.calls import Convolution, Scan
from grpo.extras.state_layers.following import follow
from grpo.extras.state_layers.packed import KNOWN, InPacked
from grpo.models.packed_attention import AttentionPlan, How, Packed, attending


class StateCache(KVCache):
    """Keys, values and states of the unfinished samples. It is the `Mixing` of a step, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        states, keys = bytes_carried(self.model)
        self.beside = states // keys if keys else 0
        self.after_prompts: dict[int, list[Tensor]] = {}  # by the prompt's number: what each function carries, [1, ...]
        self.of_samples: list[Tensor] = []  # what each function carries, [B, ...]

    @staticmethod
    def carried(model: nn.Module) -> tuple[int, int]:
        """See `bytes_carried`, for the forecast of memory."""
        return bytes_carried(model)

    def forward(self, plan: AttentionPlan, ids: Tensor, positions: Tensor, logits_to_keep: Tensor | int = 0) -> Tensor:
        self.number = 0
        if isinstance(plan, Prefill):
            KNOWN[plan] = StatePrefill(self, plan)
        return super().forward(plan, ids, positions, logits_to_keep)

    def admit(self, waiting: deque[int]) -> tuple[list[int], Tensor | None]:
        new, logits = super().admit(waiting)
        if new:
            joined = [
                torch.cat(each) for each in zip(*(self.after_prompts[self.prompt_of[i]] for i in new), strict=True)
            ]
            here = self.of_samples or [x[:0] for x in joined]
            self.of_samples = [torch.cat(pair) for pair in zip(here, joined, strict=True)]
        return new, logits

    def drop(self, ended: Collection[int]) -> list[int]:
        order = super().drop(ended)
        self.after_prompts = {u: carried for u, carried in self.after_prompts.items() if u in self.prompts}
        self.of_samples = [x[order] for x in self.of_samples]
        return order

    def convolve(self, convolution: Convolution) -> Tensor:
        """Append a token of each row. x: [1, D, B]."""
        x = torch.cat([self.of_samples[self.number], convolution.x[0].T[..., None]], dim=2)  # [B, D, width]
        self.carry(x[..., 1:])
        return convolution.of(x)[..., -1].T[None]

    def scan(self, scan: Scan) -> Any:
        """Change each row's state by its token, one of B in the packed row."""
        each = torch.arange(len(self.rows), device=self.device)[:, None]
        out, state = scan.of(
            scan.at(each, torch.zeros_like(each, dtype=torch.bool)), self.of_samples[self.number], True
        )
        self.carry(state)
        return scan.result(out.transpose(0, 1))

    def carry(self, now: Tensor) -> None:
        """Store what the present function carries on, [B, ...]."""
        self.of_samples[self.number] = now
        self.number += 1


class StatePrefill(InPacked):
    """The functions of a pass that reads prompts: it stores what is carried on after each."""

    def __init__(self, cache: StateCache, plan: Prefill) -> None:
        super().__init__(plan)
        self.cache, self.read = cache, cache.prompts[-len(plan.kept) :]

    def convolve(self, convolution: Convolution) -> Tensor:
        lengths = torch.tensor([len(self.cache.texts[u]) for u in self.read])
        last = lengths[:, None] + torch.arange(1 - convolution.width, 0)  # [n, width - 1]
        last, nothing = last.clamp(min=0).to(self.plan.device), (last < 0).to(self.plan.device)
        x = convolution.x[0].T[self.plan.kept.gather(1, last)].masked_fill(nothing[..., None], 0.0)
        self.store(x.transpose(1, 2))
        return super().convolve(convolution)

    def scan(self, scan: Scan) -> Any:
        out, states = self.scanned(scan, final=True)
        self.store(states)
        return scan.result(out)

    def store(self, carried: Sequence[Tensor]) -> None:
        """Store what a function carries on after each prompt, [n, ...]."""
        for u, one in zip(self.read, carried, strict=True):
            self.cache.after_prompts.setdefault(u, []).append(one[None])


class OneToken(Packed):
    """A sequence of one token, whose functions count bytes. Mutable: states, all that it carries on; keys, its keys and
    values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([[0]], [[]], device)
        self.states = self.keys = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        self.keys += key.nbytes + value.nbytes
        return super().attend(layer, query, key, value, how)


class Counted(InPacked):
    """The functions of a `OneToken`."""

    def convolve(self, convolution: Convolution) -> Tensor:
        self.plan.states += (convolution.width - 1) * convolution.x.nbytes
        return super().convolve(convolution)

    def scan(self, scan: Scan) -> Any:
        out, states = self.scanned(scan, final=True)
        self.plan.states += states.nbytes
        return scan.result(out)


@torch.no_grad()
def bytes_carried(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of what a sequence carries from token to token, and of a token's keys and values."""
    if not follow(model):
        return 0, 0
    if model not in SIZES:
        plan = OneToken(model.device)
        KNOWN[plan] = Counted(plan)
        with attending(model, plan):
            model(input_ids=plan.ids, position_ids=plan.positions, use_cache=False)
        SIZES[model] = plan.states, plan.keys
    return SIZES[model]


SIZES: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


def follow_states(model: nn.Module) -> type[StateCache] | None:
    """Let the layers of a model that carry a state follow plans. Returns the cache with which an engine samples from it."""
    return StateCache if follow(model) else None
