"""Attention by plan: one row holds many sequences without padding, and a plan says which tokens each token
attends to.

A transformers model looks up its attention function by name. In `attending` that name is ours, and follows
the plan. `pack` makes the plan of a batch. Knows nothing of losses or sampling.

Shapes: T tokens in the row, N prompts of up to P tokens, R rows of up to C tokens that follow a prompt, H
heads, K key heads.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from grpo.objectives.batch import TokenBatch
from grpo.system.memory import sent

NAME, NEVER = "grpo", 2**62  # NEVER: the position of a place without a token
# the arguments that a plan follows; the values of others with which they change nothing; and what some others mean
FOLLOWED = {"scaling", "sliding_window", "scores", "position_ids", "use_cache"}
NOTHING = {"dropout": 0.0, "is_causal": True} | dict.fromkeys(("output_attentions", "output_router_logits"), False)
MEANING = {"block_indices": "picks the blocks of tokens that it sees", "indices": "picks the tokens that it sees"}
PLAN: ContextVar["AttentionPlan | None"] = ContextVar("plan", default=None)  # in `attending`
# called with the type of a model before it follows a plan; grpo/extras/scores puts itself here
BEFORE: list[Callable[[str], None]] = []


class Unplanned(ValueError):
    """A model needs more of attention than a plan has; one sentence says what."""


class Weighing(Protocol):
    """How a layer makes weights of its scores, if not by a softmax alone: see grpo/extras/scores."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Return what `sdpa` does, with these weights."""

    def weights(self, scores: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return the weights, [B, H, ..., S]. scores: of the same shape, before the scale. mask: 0 or -inf."""

    def fused(self, kernel: Callable[..., Any], *arguments: Tensor, **named: Any) -> Tensor:
        """Return what `kernel` does with these arguments, those of torch's flex_attention, with these weights."""


class How(NamedTuple):
    """How a layer attends. scale: of its scores; None: D^-0.5. window: how many tokens a query sees, itself
    included, or a function that returns how many of the first tokens queries at these positions do not see;
    None: all. scores: None for a softmax."""

    scale: float | None = None
    window: int | Callable[[Tensor], Tensor] | None = None
    scores: Weighing | None = None

    def hidden(self, positions: Tensor) -> Tensor:
        """Return how many of the first tokens queries at these positions do not see, of their shape."""
        if callable(self.window):
            return self.window(positions)
        return (positions - (self.window or NEVER) + 1).clamp(min=0)


class AttentionPlan(Protocol):
    """Computes attention for a row that holds many sequences. positions: of its tokens, [1, T]."""

    positions: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Return the output, [1, T, H, D]. query: [1, H, T, D]; key, value: [1, K, T, D]."""


def by_plan(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs):
    """An attention function for transformers, with the shapes of `attend`. Raises `Unplanned`."""
    for name, given in kwargs.items():
        if given is not None and name not in FOLLOWED and not (name in NOTHING and given == NOTHING[name]):
            raise Unplanned(
                f"its attention {MEANING.get(name, f'takes {name}, which attention by plan does not know')}"
            )
    how = How(*map(kwargs.get, ("scaling", "sliding_window", "scores")))
    return PLAN.get().attend(module.layer_idx, query, key, value, how), None


AttentionInterface.register(NAME, by_plan)


@contextmanager
def attending(model: nn.Module, plan: AttentionPlan | None, name: str = NAME):
    """In this `with`, `model` uses the attention function of this name. Ours follows the plan."""
    config = model.config.get_text_config()
    for prepare in BEFORE:
        prepare(config.model_type)
    before, token = config._attn_implementation, PLAN.set(plan)
    config._attn_implementation = name
    try:
        yield
    finally:
        PLAN.reset(token)
        config._attn_implementation = before


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the output, [B, H, Q, D]. query: [B, H, Q, D]; key, value: [B, K, S, D]; mask: bool; None:
    causal."""
    if query.device.type != "cpu" and mask is not None and key.shape[1] != query.shape[1]:
        # on GPUs no fast kernel takes both a mask and grouped heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


class Packed:
    """Prompts, each followed by its rows. A row sees its prompt and itself, as if it came right after. Exact
    for causal models.

    ids, positions: [1, T], for the model. starts: the index in T of the start of each prompt, then of each
    row, in order.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Sequence[Sequence[int]]],
        device: torch.device,
        kernel: "Kernel | None" = None,
    ) -> None:
        """rows: of each prompt, maybe none. kernel: None for sdpa."""
        self.kernel, self.device = kernel and (None if kernel.failed else kernel), device
        missing = self.kernel.padding(prompts, rows) if self.kernel else 0
        if missing:  # as one more prompt, which nothing else sees
            prompts, rows = [*prompts, (0,) * missing], [*rows, ()]
        owner: list[int] = []  # each row's prompt
        parts = []  # ids, position of the first, number of its prompt, of its row (-1: none)
        for n, (prompt, rows_of_prompt) in enumerate(zip(prompts, rows, strict=True)):
            parts.append((prompt, 0, n, -1))
            for row in rows_of_prompt:
                parts.append((row, len(prompt), n, len(owner)))
                owner.append(n)
        lengths = torch.tensor([len(ids) for ids, *_ in parts])
        starts = lengths.cumsum(0) - lengths
        begin, number, row_number = torch.tensor([numbers for _, *numbers in parts]).T
        self.within, self.prompt_of, self.row_of = (
            x.repeat_interleave(lengths) for x in (begin - starts, number, row_number)
        )
        self.within += torch.arange(len(self.within))  # positions, in the host's memory
        self.host = torch.tensor(
            [token for ids, *_ in parts for token in ids], dtype=torch.int64
        )  # ids in the host's memory
        self.ids, self.positions = sent(self.host[None], device), sent(self.within[None], device)
        self.starts = [*starts[row_number < 0].tolist(), *starts[row_number >= 0].tolist()]
        self.owner = torch.tensor(owner, dtype=torch.int64)
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.row_lengths = torch.tensor(
            [len(row) for rows_of_prompt in rows for row in rows_of_prompt], dtype=torch.int64
        )
        self.masks: dict[Any, Any] = {}  # the kernel's, by window
        self.dense: dict[Any, Any] = {}  # sdpa's
        self.until = float("inf")  # the first layer that the kernel could not compute

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        # a layer that is recomputed is computed as it was, also after a later one has failed
        if self.kernel is not None and layer < self.until:
            if (out := self.kernel.attend(self, query, key, value, how)) is not None:
                return out.transpose(1, 2)
            self.until = layer
        if how.window not in self.dense:
            self.dense[how.window] = self.dense_masks(how)
        of_prompts, of_rows = self.dense[how.window]
        attention = how.scores or sdpa
        prompts, rows, keys, back = self.places
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        out = attention(take(query, prompts), take(key, prompts), take(value, prompts), of_prompts, how.scale)
        flat = out.transpose(1, 2).flatten(0, 1)  # [N x P, H, D]
        if rows.numel():
            out = attention(take(query, rows), take(key, keys), take(value, keys), of_rows, how.scale)
            flat = torch.cat([flat, out.transpose(1, 2).flatten(0, 1)])  # [N x P + R x C, H, D]
        return flat.index_select(0, back)[None]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return indices in T: of the prompts' tokens [N, P], of the rows' tokens [R, C], of the keys that a
        row sees [R, P + C]; and for each token of T its index in prompts and rows, flattened, [T]."""
        count = len(self.prompt_lengths)
        prompts = padded_places(torch.tensor(self.starts[:count]), self.prompt_lengths)
        rows = padded_places(torch.tensor(self.starts[count:], dtype=torch.int64), self.row_lengths)
        in_row = prompts.numel() + self.row_of * rows.shape[1] + self.within - self.prompt_lengths[self.prompt_of]
        back = torch.where(self.row_of < 0, self.prompt_of * prompts.shape[1] + self.within, in_row)
        keys = torch.cat([prompts[self.owner], rows], dim=1)
        return tuple(sent(index, self.device) for index in (prompts, rows, keys, back))

    def dense_masks(self, how: How) -> tuple[Tensor | None, Tensor]:
        """Return the masks of the prompts, [P, P] bool or None for causal, and of the rows, [R, 1, C, P + C]
        bool."""
        prompts, rows, _, _ = self.places
        p, c = torch.arange(prompts.shape[1]), torch.arange(rows.shape[1])
        length = self.prompt_lengths[self.owner, None]  # [R, 1]
        queries = (length + c)[:, :, None]  # the positions, [R, C, 1]
        keys = torch.cat([p.expand(len(length), -1), length + c], dim=1)[:, None]  # [R, 1, P + C]
        real = torch.cat([p < length, torch.ones_like(length + c, dtype=torch.bool)], dim=1)[:, None]
        sees, of_prompts = real & (keys <= queries) & (keys >= how.hidden(queries)), None
        if (first := how.hidden(p)).any():
            of_prompts = sent((p <= p[:, None]) & (p >= first[:, None]), self.device)
        return of_prompts, sent(sees[:, None], self.device)


class Kernel(Protocol):
    """Computes the attention of packed rows on a GPU, where it is faster than sdpa with a dense mask."""

    name: str
    failed: str  # why it is no longer used in this process; empty as long as it works

    def padding(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]) -> int:
        """Return how many tokens the packed row of these prompts and rows lacks to a length that the kernel
        takes."""

    def attend(self, plan: Packed, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor | None:
        """Return the output, [1, H, T, D]; None if it fails, after a warning. Shapes as in `AttentionPlan`.
        It may keep the mask of each window in plan.masks."""

    def objection(self, model: nn.Module, layout: str, compare: Callable[..., str]) -> str:
        """Return why it must not be used for a model; empty if it agrees. compare: see `packing.Compare`."""


def padded_places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the indices of n sequences, from their starts on, [n, longest]; padding repeats the last one."""
    longest = int(lengths.max()) if len(lengths) else 0
    return (starts[:, None] + torch.arange(longest).minimum(lengths[:, None] - 1)).clamp(min=0)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Return x at these places, [n, H, L, D]. x: [T, H, D]; places: [n, L]."""
    return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:]).transpose(1, 2)


def states_by_plan(decoder: nn.Module, batch: TokenBatch, share: bool, kernel: "Kernel | None") -> Tensor:
    """Return a decoder's last hidden state before each sampled token, [n, hidden], of a row that `pack` makes."""
    plan, places = pack(batch, share, kernel)
    with attending(decoder, plan):
        states = decoder(input_ids=plan.ids, position_ids=plan.positions, use_cache=False)
    return states.last_hidden_state[0].index_select(0, places)


def pack(batch: TokenBatch, share: bool, kernel: Kernel | None = None) -> tuple[Packed, Tensor]:
    """Return all rows as one sequence, and in it the index of the token before each sampled one, [n], ordered
    as `batch.mask`.

    A row ends with the token before its last sampled one, since later tokens predict nothing that is needed.
    """
    mask = (batch.host or batch).mask.cpu()
    ends = mask.flip(1).cumsum(1).bool().sum(1).sub(1).clamp(min=0).tolist()
    prompts, rows, together = [], [], {}
    for r, ((prompt, completion), end) in enumerate(zip(batch.sequences(), ends, strict=True)):
        prompts.append(prompt)
        rows.append(completion[:end])
        together.setdefault(prompt if share else r, []).append(r)
    # not flash_attn's varlen: there a row is one interval of keys, and here it sees its group's prompt too
    shared, rest = [], []  # of each group: the tokens that its rows share, and those of each row after them
    for members in together.values():
        prompt, several = prompts[members[0]], len(members) > 1
        # a row alone is one sequence with its prompt
        shared.append(prompt if several else prompt + rows[members[0]])
        rest.append([rows[r] for r in members] if several else [])
    plan = Packed(shared, rest, batch.ids.device, kernel)
    # by row: the indices in T of its prompt's last token, and of its own first
    before: dict[int, tuple[int, int]] = {}
    of_prompts, of_rows = plan.starts[: len(shared)], iter(plan.starts[len(plan.prompt_lengths) :])
    for members, first in zip(together.values(), of_prompts, strict=True):
        for r in members:
            last = first + len(prompts[r]) - 1
            before[r] = last, next(of_rows) if len(members) > 1 else last + 1
    last, start = torch.tensor([before[r] for r in range(len(rows))]).T[..., None]  # [B, 1]
    places = torch.cat([last, start + torch.arange(mask.shape[1])], dim=1)[:, :-1]  # [B, C]
    return plan, sent(places[mask], batch.ids.device)
