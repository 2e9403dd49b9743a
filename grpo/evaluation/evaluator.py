"""How good is the policy? The same environments and rewards as in training, on examples it never trains on.

A metric is the mean over problems, each the mean of its own samples, with an interval that counts problems: docs/evaluation.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, get_args

import pandas as pd

from grpo.engines.protocol import Engine, Sampling
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Split, Task
from grpo.evaluation.metrics import columns, estimates
from grpo.evaluation.statistics import Estimate
from grpo.rollout.episodes import play
from grpo.rollout.samples_table import records
from grpo.rollout.types import Group, Limits
from grpo.system.errors import RewardError, RolloutError, UserError, check_least, oneof
from grpo.system.seeds import EVALUATION, derive_seed


@dataclass(frozen=True)
class Evaluation:
    """The policy on held-out examples, after `rollout` rollouts. A group holds the samples of one example.

    estimates: every metric with its interval, by name without eval/. columns: further ones for `records`. seconds: it took.
    """

    rollout: int
    groups: Sequence[Group]
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    columns: Mapping[str, list[list[Any]]] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """As a run logs them."""
        found = {f"eval/{name}": float(estimate.value) for name, estimate in self.estimates.items()}
        return found if self.seconds is None else {**found, "time/eval": self.seconds}


@dataclass(frozen=True)
class Evaluator:
    """Plays the first `limit` examples of a split (all of them: null), `samples` times each, `batch` examples together (or all).

    With one sample greedy is the usual choice (temperature 0); pass@k wants several, and a temperature. every: rollouts
    between two evaluations in training, 0 for none; on_start: also before the first. by: columns of the examples to tell results
    by, where there are any.
    """

    sampling: Sampling
    samples: int = 1
    limit: int | None = 200
    every: int = 10
    on_start: bool = True
    split: Split = "test"
    limits: Limits = field(default_factory=Limits)
    batch: int | None = None
    by: Sequence[str] = ()

    def __post_init__(self) -> None:
        oneof("eval.split", self.split, get_args(Split))
        for name, least in (("samples", 1), ("limit", 1), ("every", 0), ("batch", 1)):
            check_least(f"eval.{name}", getattr(self, name), least)
        if self.samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"eval.samples={self.samples} at temperature 0 are all equal: set eval.sampling.temperature=1"
            )

    def chosen(self, examples: Sequence[Example]) -> list[Example]:
        return list(islice(examples, self.limit))

    def batches(self, count: int) -> list[range]:
        """The places of the examples that are played together."""
        size = self.batch or count
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def play(
        self, task: Task, engine: Engine, renderer: Renderer, seed: int, examples: Sequence[Example], places: range
    ) -> list[Group]:
        """The groups of these places. Seeds know the place among all examples: batches change nothing but the last bits."""
        batch = [examples[i] for i in places]

        def seeds(p: int, *path: int) -> int:
            return derive_seed(seed, EVALUATION, places.start + p, *path)

        try:
            return play(task, batch, self.samples, engine, renderer, self.sampling, seeds, self.limits)
        except RolloutError as error:
            if isinstance(error, RewardError) or places.start == 0:
                raise
            return error.groups  # all environments of a later batch, which may be of one example, failed

    def __call__(
        self,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        seed: int,
        rollout: int = 0,
        examples: Sequence | None = None,
    ) -> Evaluation:
        """examples: others than those of the task's split."""
        examples = self.chosen(task.examples(self.split) if examples is None else examples)
        batches = self.batches(len(examples))
        groups = [group for places in batches for group in self.play(task, engine, renderer, seed, examples, places)]
        more = columns(task, groups, self.by)
        return Evaluation(rollout, groups, estimates(pd.DataFrame(records(groups, **more))), more)
