"""Layer 2 - how good is the policy? The same environments and rewards as in training, on examples it never trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import get_args

import numpy as np

from grpo.engine import Engine, Sampling
from grpo.errors import UserError
from grpo.play import play
from grpo.renderer import Renderer
from grpo.rl import Example, Split, Task
from grpo.rollout import EVALUATION, Group, Limits, derive_seed, sample_means, share_right


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that at least one of k is right, unbiased, from n samples with c right.

    arXiv 2107.03374.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


@dataclass(frozen=True)
class Evaluation:
    """rollout: how many rollouts the policy had learned from. A group holds the samples of one example."""

    rollout: int
    groups: Sequence[Group]
    metrics: Mapping[str, float] = field(default_factory=dict)


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """eval/accuracy, and where there are several samples of an example eval/pass@k of so many: both over what could be graded,
    since what nobody could tell is not wrong (NaN where that is all). eval/length in tokens; eval/truncated; the shares of
    outcomes; and every part of the reward by name (eval/format among them)."""
    samples = [sample for group in groups for sample in group]
    k = len(groups[0])
    found = {"accuracy": share_right(samples)}
    if k > 1:
        right = [
            sum(sample.reward.correct for sample in group) for group in groups if all(s.reward.known for s in group)
        ]
        found[f"pass@{k}"] = np.mean([pass_at_k(k, c, k) for c in right]) if right else np.nan
    found = found | sample_means(samples) | found  # in this order, and no part of a reward takes our names
    return {f"eval/{name}": float(value) for name, value in found.items()}


@dataclass(frozen=True)
class Evaluator:
    """Plays the first `limit` examples of a split (all of them: null), `samples` times each.

    With one sample greedy is the usual choice (temperature 0); pass@k wants several, and a temperature. every: rollouts
    between two evaluations in training, 0 for none; on_start: also before the first.
    """

    sampling: Sampling
    samples: int = 1
    limit: int | None = 200
    every: int = 10
    on_start: bool = True
    split: Split = "test"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise UserError(f"eval.split={self.split} is not one of {', '.join(get_args(Split))}")
        for name, least in (("samples", 1), ("limit", 1), ("every", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UserError(f"eval.{name}={value} must be at least {least}")
        if self.samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"eval.samples={self.samples} at temperature 0 would be equal samples: set eval.sampling.temperature=1"
            )

    def __call__(
        self,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        seed: int,
        rollout: int = 0,
        examples: Sequence[Example] | None = None,
    ) -> Evaluation:
        """examples: others than those of the task's split."""
        examples = task.examples(self.split) if examples is None else examples
        examples = [examples[i] for i in range(min(len(examples), self.limit or len(examples)))]
        groups = play(
            task,
            examples,
            self.samples,
            engine,
            renderer,
            self.sampling,
            lambda *path: derive_seed(seed, EVALUATION, *path),
            self.limits,
        )
        return Evaluation(rollout, groups, metrics(groups))
