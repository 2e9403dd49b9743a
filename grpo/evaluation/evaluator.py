"""Evaluates the policy with the environments and rewards of training, on examples that it is never trained on.

A metric is averaged over the samples of each problem, then over problems. Its interval counts problems: docs/evaluation.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pandas as pd

from grpo.engines.protocol import Engine, Sampling
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Split, Task
from grpo.evaluation.metrics import columns, estimates
from grpo.evaluation.statistics import Estimate
from grpo.rollout.episodes import Play, play
from grpo.rollout.samples_table import records
from grpo.rollout.types import Group, Limits
from grpo.system.errors import RewardError, RolloutError, UserError
from grpo.system.ranges import Count, Whole, enforced
from grpo.system.seeds import EVALUATION, derive_seed


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation after `rollout` rollouts. A group holds the samples of one example.

    estimates: every metric with its interval, by its name without eval/. columns: more columns for `records`. seconds: duration.
    """

    rollout: int
    groups: Sequence[Group]
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    columns: Mapping[str, list[list[Any]]] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics as a run logs them, named eval/NAME."""
        found = {f"eval/{name}": float(estimate.value) for name, estimate in self.estimates.items()}
        return found if self.seconds is None else {**found, "time/eval": self.seconds}


@enforced("eval")
@dataclass(frozen=True)
class Evaluator:
    """Evaluates on the first `limit` examples of a split (None: all), with `samples` samples of each.

    One sample is usually greedy (temperature 0); pass@k needs several samples and a temperature above 0.
    every: rollouts between two evaluations during training; 0: none. on_start: also evaluate before the first rollout.
    batch: number of examples played together; None: all. by: columns of the examples; each of their values gets its own result.
    play: who plays the episodes.
    """

    sampling: Sampling
    samples: Count = 1
    limit: Count | None = 200
    every: Whole = 10
    on_start: bool = True
    split: Split = "test"
    limits: Limits = field(default_factory=Limits)
    batch: Count | None = None
    by: Sequence[str] = ()
    play: Play = play

    def __post_init__(self) -> None:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"eval.samples={self.samples} at temperature 0: all samples are equal, set eval.sampling.temperature=1"
            )

    def chosen(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples to evaluate on: the first `limit`."""
        return list(islice(examples, self.limit))

    def batches(self, count: int) -> list[range]:
        """Return the indices of each batch of `count` examples."""
        size = self.batch or count
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def one_batch(
        self, task: Task, engine: Engine, renderer: Renderer, seed: int, examples: Sequence[Example], places: range
    ) -> list[Group]:
        """Play the examples at these indices. Seeds depend on the index among all examples, not on the batch, so batches change
        at most the last bits of numbers."""
        batch = [examples[i] for i in places]

        def seeds(p: int, *path: int) -> int:
            return derive_seed(seed, EVALUATION, places.start + p, *path)

        try:
            return self.play(task, batch, self.samples, engine, renderer, self.sampling, seeds, self.limits)
        except RolloutError as error:
            if isinstance(error, RewardError) or places.start == 0:
                raise
            return error.groups  # all environments of a later batch failed, which may be of one example

    def __call__(
        self,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        seed: int,
        rollout: int = 0,
        examples: Sequence | None = None,
    ) -> Evaluation:
        """Evaluate the policy that `engine` holds.

        examples: to use instead of those of the task's split. rollout: the number of rollouts learned from so far.
        """
        examples = self.chosen(task.examples(self.split) if examples is None else examples)
        batches = self.batches(len(examples))
        groups = [
            group for places in batches for group in self.one_batch(task, engine, renderer, seed, examples, places)
        ]
        more = columns(task, groups, self.by)
        return Evaluation(rollout, groups, estimates(pd.DataFrame(records(groups, **more))), more)
