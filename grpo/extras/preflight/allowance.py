"""The time that the checks of a run aim at: a share of the planned run, known better with each measurement."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.training.module import GRPOModule

LEAST = 3.0  # seconds
SHARE = 0.05  # of the seconds of all rollouts and updates
ROLLOUTS = 1  # with its update: the checks of a short run pass through the model as often as those of a long one


@dataclass
class Allowance:
    """Mutable. rollouts: of the run. rollout, update: seconds of one, 0 until they are known. fixed: seconds of all checks,
    whatever the run takes; None: LEAST, SHARE of the run, or ROLLOUTS of it, whichever is the most."""

    rollouts: int
    fixed: float | None = None
    rollout: float = 0.0
    update: float = 0.0
    begun: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """The seconds that all checks together aim to take: they choose by it how much they compare."""
        if self.fixed is not None:
            return self.fixed
        return max(LEAST, max(SHARE * self.rollouts, ROLLOUTS) * (self.rollout + self.update))

    def left(self, share: float = 1.0) -> float:
        """Return this share of the seconds that are left, on the device that has the fewest; at least 0."""
        spent = time.perf_counter() - self.begun
        return share * max(0.0, min(distributed.all_gather([self.seconds - spent])))

    def line(self, parts: Mapping[str, float]) -> str:
        """Return the seconds that were spent and aimed at, in words, with the longest of the parts if they are more."""
        spent, (seconds, name) = time.perf_counter() - self.begun, max((parts[name], name) for name in parts)
        over = f"; the longest part: {name}, {seconds:.1f} s" if spent > self.seconds else ""
        return f"{spent:.1f} s, aimed at {self.seconds:.1f} s{over}"


def slowest(seconds: float) -> float:
    """Return the most seconds that a device took, so that all devices choose alike."""
    return max(distributed.all_gather([seconds]))


def added_tokens(tokens: TokenBatch, module: GRPOModule) -> Tensor:
    """Return how many tokens each row adds to a pass of the rows before it, [B]: a shared prompt passes once."""
    known: set[tuple[int, ...]] = set()
    added = []
    for prompt, completion in tokens.sequences():
        again = prompt in known and module.layout[0] == "shared_prompt"
        added.append(len(completion) + (0 if again else len(prompt)))
        known.add(prompt)
    return torch.tensor(added)


def shortened(rows: TokenBatch, tokens: int, sampled: int | None = None) -> TokenBatch:
    """Return shorter rows, of at most `tokens` tokens each, 8 at least: the end of the prompt, and the beginning of what follows,
    at most half of them if the prompt has the other half, and at most `sampled`. A picture has no parts: rows with one stay."""
    if bool((rows.ids < 0).any()):
        return rows
    tokens = max(8, tokens)
    after = min(rows.completion_width, max(tokens // 2, tokens - rows.prompt_width), max(1, sampled or tokens))
    before = max(1, min(rows.prompt_width, tokens - after))
    left, right = rows.prompt_width - before, rows.prompt_width + after
    change = {name: getattr(rows, name)[:, left:right] for name in ("ids", "attention_mask")}
    for name in ("mask", "rollout_logprobs", "turn", "given"):
        change[name] = getattr(rows, name)[:, :after]
    return replace(rows, **change).trimmed()
