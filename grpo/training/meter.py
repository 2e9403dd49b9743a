"""The metrics of a rollout's updates: means over tokens, and extremes, independent of microbatches and ranks."""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import LARGEST_LOG_RATIO
from grpo.system import distributed


class Means:
    """Running means by name, each with its own count, and extremes, whose names end in _min or _max. A mean NAME^2 of squares
    becomes NAME_std, the standard deviation. Means NAME^w of weights and NAME^w^2 of their squares become NAME, the effective
    sample size (sum w)^2 / (n sum w^2), as a share.

    Adding a tensor of a device does not wait for the device: it is kept, and `settle` reads all of them at once.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.waiting: list[tuple[str, Tensor, Tensor]] = []  # name, sum or extreme, count

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1.0) -> None:
        """Add the sum of `count` values to the mean `name`."""
        if is_on_device(total):
            count = count if isinstance(count, Tensor) else total.new_full((), count)
            self.waiting.append((name, total, count))
        else:
            self.sums[name] += float(total)
            self.counts[name] += float(count)

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values [B, C] at which the mask [B, C] is True."""
        self.add(name, values.masked_fill(~mask, 0).sum(), mask.sum())

    def add_extreme(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Update an extreme with the values [B, C] at which the mask [B, C] is True. name: ends in _min or _max."""
        if values.numel():
            lowest = name.endswith("_min")
            values = values.masked_fill(~mask, torch.inf if lowest else -torch.inf)
            self.keep(name, values.amin() if lowest else values.amax(), mask.sum())

    def keep(self, name: str, value: float | Tensor, count: float | Tensor = 1.0) -> None:
        """Update an extreme with that of `count` values, maybe none. name: ends in _min or _max."""
        if is_on_device(value):
            self.waiting.append((name, value, count))
        elif count:
            extreme, number = min if name.endswith("_min") else max, float(value)
            self.extremes[name] = extreme(number, self.extremes.get(name, number))

    def settle(self) -> None:
        """Read the tensors that were added, by one copy."""
        if not self.waiting:
            return
        names, values, counts = zip(*self.waiting, strict=True)
        self.waiting = []
        numbers = torch.stack([torch.stack(values), torch.stack(counts)]).tolist()  # [2, waiting]
        for name, value, count in zip(names, *numbers, strict=True):
            (self.keep if name.endswith(("_min", "_max")) else self.add)(name, value, count)

    def end_epoch(self, epoch: int, epochs: int) -> None:
        """Add loss/policy_epoch_K, the loss of the tokens since the last epoch ended, if there are several. epoch: from 0."""
        if epochs > 1:
            self.settle()
            earlier = [f"loss/policy_epoch_{k}" for k in range(1, epoch + 1)]
            total = self.sums["loss/policy"] - sum(self.sums[name] for name in earlier)
            count = self.counts["loss/policy"] - sum(self.counts[name] for name in earlier)
            self.add(f"loss/policy_epoch_{epoch + 1}", total, count)

    def take(self, other: "Means") -> None:
        """Add all values of other means."""
        self.waiting += other.waiting
        for name, value in other.sums.items():
            self.add(name, value, other.counts[name])
        for name, value in other.extremes.items():
            self.keep(name, value)

    def result(self) -> dict[str, float]:
        """Return all means, standard deviations and extremes over all ranks. A mean without values is left out."""
        self.settle()
        merged = Means()
        # sums and counts, not means: ranks have different numbers of tokens
        for other in distributed.all_gather([self]):
            merged.take(other)
        means = {name: total / merged.counts[name] for name, total in merged.sums.items() if merged.counts[name]}
        for name in [name for name in means if name.endswith("^w")]:
            weight, squares = means.pop(name), means.pop(f"{name}^2")
            means[name.removesuffix("^w")] = weight**2 / squares if squares else 0.0
        for name in [name for name in means if f"{name}^2" in means]:
            means[f"{name}_std"] = math.sqrt(max(means.pop(f"{name}^2") - means[name] ** 2, 0.0))
        return means | merged.extremes


def is_on_device(value: float | Tensor) -> bool:
    """Return whether reading a number waits for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def note_loss(means: Means, microbatch: TokenBatch, logprobs: Tensor, logged: Mapping[str, Tensor]) -> None:
    """Add the numbers that `Algorithm.loss` logs, and log-probabilities by the sign of the advantage. All are [B, C]. Tokens at
    LARGEST_LOG_RATIO, which have no gradient, count as clipped."""
    mask = microbatch.mask
    if "ratio" in logged:
        part = logged["ratio"].log() / LARGEST_LOG_RATIO  # 1 at the largest log-ratio, up to rounding
        for name, cut in {"clip_fraction_low": part < -0.9999, "clip_fraction_high": part > 0.9999}.items():
            logged = {**logged, name: torch.where(cut, 1.0, logged.get(name, cut))}
    for name, values in logged.items():
        means.add_tokens(f"loss/{name}", values, mask)
    if "ratio" in logged:
        means.add_extreme("loss/ratio_min", logged["ratio"], mask)
        means.add_extreme("loss/ratio_max", logged["ratio"], mask)
        weights = (logprobs - microbatch.rollout_logprobs).clamp(max=LARGEST_LOG_RATIO).exp()
        means.add_tokens("loss/effective_samples^w", weights, mask)
        means.add_tokens("loss/effective_samples^w^2", weights.square(), mask)
    means.add_tokens("loss/logprobs_positive", logprobs, mask & (microbatch.advantages > 0))
    means.add_tokens("loss/logprobs_negative", logprobs, mask & (microbatch.advantages < 0))


def note_engine(means: Means, microbatch: TokenBatch) -> None:
    """Add the differences between the engine's and the trainer's log-probabilities of the same policy."""
    gap = (microbatch.old_logprobs - microbatch.rollout_logprobs).abs()
    mask = microbatch.mask if microbatch.fresh is None else microbatch.mask & microbatch.fresh[:, None]
    means.add_tokens("rollout/logprob_gap", gap, mask)
    means.add_extreme("rollout/logprob_gap_max", gap, mask)
    for side in ("rollout_logprobs", "old_logprobs"):
        means.add_tokens(f"rollout/{side}", getattr(microbatch, side), mask)
        means.add_tokens(f"rollout/{side}^2", getattr(microbatch, side).square(), mask)


def of_advantages(advantages: Tensor) -> dict[str, float]:
    """Return the metrics of the advantages [N, G] of all ranks' samples. Samples that nothing is learned from have 0."""
    numbers = {"positive": (advantages > 0).sum(), "negative": (advantages < 0).sum()}
    numbers |= {"mean": advantages.mean(), "std": advantages.std(correction=0)}
    return {f"rollout/advantages_{name}": float(number) for name, number in numbers.items()}
