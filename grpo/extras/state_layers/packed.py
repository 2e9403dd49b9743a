"""Where sequences begin in a packed row, for functions that mix tokens: a prompt begins with nothing, and a row with what its
prompt has left.

The state after a prompt is computed once, and gradients of all its rows flow into it. Prompts are scanned side by side, then
rows; only there are they padded.

Shapes: T tokens in the row, N prompts of up to P tokens, R rows of up to C tokens that follow a prompt, D channels.
"""

from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor

from grpo.extras.state_layers.calls import Convolution, Scan
from grpo.models.packed_attention import Packed
from grpo.system.memory import sent


class Mixing(Protocol):
    """Computes the functions of one pass by its plan."""

    def convolve(self, convolution: Convolution) -> Tensor:
        """Return the convolution of all tokens, [1, D, T]."""

    def scan(self, scan: Scan) -> Any:
        """Return what the function does: the outputs, and the state if it is of those that always return one."""


class InPacked:
    """The functions of a packed row."""

    def __init__(self, plan: Packed) -> None:
        self.plan = proxy(plan)  # as long as there is a plan, this is in KNOWN
        self.count, self.windows = len(plan.prompt_lengths), {}

    @cached_property
    def places(self) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        """Return where in T the tokens are of prompts [N, P], of rows [R, C], and of rows with their prompt [R, P + C]; which of
        these places are padding, bool; and where in [N x P + R x C], or in [N x P + R x (P + C)], each token of T is, [T].

        Padding is on the left where the state is zero, which tokens of zeros do not change. On the right of a row nothing reads
        it.
        """
        plan, starts = self.plan, torch.tensor(self.plan.starts)
        before, own, owner = plan.prompt_lengths, plan.row_lengths, plan.owner
        prompts, of_rows = on_the_left(before), torch.arange(int(own.max())) if len(own) else own
        both = on_the_left(before[owner] + own)
        in_prompt, first, after = both < before[owner, None], starts[self.count :, None], before[owner, None]
        found = (
            (starts[: self.count, None] + prompts, prompts < 0),
            (first + of_rows, of_rows >= own[:, None]),
            (torch.where(in_prompt, starts[owner, None] + both, first + both - after), both < 0),
        )
        number, length = plan.row_of.clamp(min=0), prompts.shape[1]
        of_prompt = plan.prompt_of * length + length - before[plan.prompt_of] + plan.within
        back = [of_prompt]
        for width, shift in ((len(of_rows), -after[:, 0]), (both.shape[1], both.shape[1] - after[:, 0] - own)):
            in_row = self.count * length + number * width + plan.within
            back.append(torch.where(plan.row_of < 0, of_prompt, in_row + shift[number] if len(own) else in_row))
        last = len(plan.within) - 1
        return tuple(
            tuple(sent(x, plan.device) for x in (places.clamp(0, last), padding, at))
            for (places, padding), at in zip(found, back, strict=True)
        )

    def window(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a longer row in which each sequence has the `width` tokens before it: their places in T, [S], which of them are
        nothing, [S] bool; and where each token of T is, [T]."""
        if width not in self.windows:
            plan, N = self.plan, self.count
            starts, lengths, owner = torch.tensor(plan.starts), plan.prompt_lengths, plan.owner
            rank = torch.arange(N) + torch.bincount(owner, minlength=N).cumsum(0) - torch.bincount(owner, minlength=N)
            ranks = torch.cat([rank, torch.arange(len(owner)) + owner + 1])  # among all sequences in T
            number = torch.where(plan.row_of < 0, plan.prompt_of, N + plan.row_of)
            back = torch.arange(len(number)) + width * (ranks[number] + 1)
            places = torch.full((len(number) + width * len(starts),), -1)
            places[back] = torch.arange(len(number))
            last = torch.arange(-width, 0)
            before = (starts[:N] + lengths)[owner, None] + last  # the ends of the rows' prompts, [R, width]
            before = before.masked_fill(last < -lengths[owner, None], -1)
            places[(starts + width * ranks)[N:, None] + torch.arange(width)] = before
            self.windows[width] = tuple(sent(x, plan.device) for x in (places.clamp(min=0), places < 0, back))
        return self.windows[width]

    def convolve(self, convolution: Convolution) -> Tensor:
        places, nothing, back = self.window(convolution.width - 1)
        x = convolution.x.index_select(2, places).masked_fill(nothing, 0.0)
        return convolution.of(x).index_select(2, back)

    def scan(self, scan: Scan) -> Any:
        return scan.result(self.scanned(scan)[0])

    def scanned(self, scan: Scan, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, [1, T, ...], and, if final, the states after the rows, or after the prompts if there are no rows.

        With final, padding behind a row would change its state, so its prompt is scanned again before it.
        """
        prompts, rows, both = self.places
        continued, several = scan.takes_state and not final, bool(self.plan.row_lengths.sum())
        out, states = scan.of(scan.at(*prompts[:2]), final=continued if several else final)
        parts, back = [out], prompts[2]
        if several:
            # a function that begins with zeros scans the prompt again before each row
            *taken, back = rows if continued else both
            state = states.index_select(0, sent(self.plan.owner, self.plan.device)) if continued else None
            out, states = scan.of(scan.at(*taken), state, final)
            parts.append(out)
        flat = torch.cat([out.flatten(0, 1) for out in parts]).index_select(0, back)
        return flat[None], states


def on_the_left(lengths: Tensor) -> Tensor:
    """Return the number of each place's token in sequences of these lengths that end together, [n, longest]; below 0: padding."""
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest) - (longest - lengths[:, None])


KNOWN: WeakKeyDictionary[Packed, InPacked] = WeakKeyDictionary()


def mixing_of(plan: Any) -> Mixing | None:
    """Return what computes the functions of a pass with this plan; None if it is not one of sequences with states."""
    if isinstance(plan, Packed) and plan not in KNOWN:
        KNOWN[plan] = InPacked(plan)
    if isinstance(plan, Packed):
        return KNOWN[plan]
    return plan if hasattr(plan, "convolve") else None
