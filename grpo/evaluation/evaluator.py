"""Evaluates the policy with the environments and rewards of training, on examples that it is never trained on.

A metric is averaged over the samples of each problem, then over problems. Its interval counts problems: docs/evaluation.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import eq
from typing import Any, get_args

import pandas as pd

from grpo.engines.protocol import Engine, Sampling
from grpo.env.rendering import Renderer
from grpo.env.types import Example, Split, Task
from grpo.evaluation.estimates import Equal, columns, estimates
from grpo.evaluation.intervals import Estimate
from grpo.rollout.episodes import Play, play
from grpo.rollout.samples_table import records
from grpo.rollout.types import Group, Limits
from grpo.system.errors import RewardError, RolloutError, UserError
from grpo.system.output.console import busy
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
        metrics = {f"eval/{name}": float(estimate.value) for name, estimate in self.estimates.items()}
        return metrics if self.seconds is None else {**metrics, "time/eval": self.seconds}


@enforced("eval")
@dataclass(frozen=True)
class Evaluator:
    """Evaluates on the first `limit` examples of a split (None: all), with `samples` samples of each.

    One sample is usually greedy (temperature 0); pass@k needs several samples and a temperature above 0.
    every: rollouts between two evaluations during training; 0: none. on_start: also evaluate before the first rollout.
    delay: no other evaluation before that many rollouts, but that of the last rollout.
    batch: number of examples played together; None: all. by: columns of the examples; each of their values gets its own result.
    play: who plays the episodes.
    sets: further tasks by name, {NAME: {task: ...}}, whose metrics are NAME/accuracy and so on. Other keys of a set are ignored.
    equal: whether two answers are one vote of maj@n. Programs give the one of extras/grading.
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
    delay: Whole = 0
    sets: Mapping[str, Mapping[str, Any]] | None = None
    equal: Equal = eq

    def __post_init__(self) -> None:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise UserError(
                f"eval.samples={self.samples} at temperature 0: all samples are equal, set eval.sampling.temperature=1"
            )
        if self.sampling.temperatures:
            raise UserError(
                "eval.sampling.temperatures: an evaluation has one temperature: set eval.sampling.temperature"
            )
        for name, settings in (self.sets or {}).items():
            if "task" not in settings or "/" in name or name in get_args(Split):
                words = "needs a task and a name of its own, without /, as +task@eval.sets.NAME=gsm8k gives it"
                raise UserError(f"eval.sets.{name} {words}")

    def due(self, rollouts: int, of: int) -> bool:
        """Return whether to evaluate after `rollouts` rollouts of a run of `of`."""
        if not self.every or not rollouts:
            return bool(self.every and self.on_start)
        return rollouts == of or (rollouts % self.every == 0 and rollouts >= self.delay)

    def sources(self, task: Task) -> dict[str, tuple[Task, Split]]:
        """Return the tasks to evaluate on with their splits, by name: the run's task by the name of its split, and each set."""
        others = {name: (settings["task"], self.split) for name, settings in (self.sets or {}).items()}
        return {self.split: (task, self.split)} | others

    def loaded(self, task: Task | None, trains: bool = True) -> dict[str, tuple[Task, Split]]:
        """Return the task and split of training, if the run `trains`, and those of `sources`, if it evaluates. Reads all their
        rows, which shows mistakes in them."""
        sources = {"train": (task, "train")} if trains else {}
        if self.every:
            sources |= self.sources(task)
        for source, split in sources.values():
            source.examples(split)
        return sources

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

    @busy("evaluating the policy")
    def __call__(
        self,
        task: Task,
        engine: Engine,
        renderer: Renderer,
        seed: int,
        rollout: int = 0,
        examples: Mapping[str, Sequence[Example]] | None = None,
    ) -> Evaluation:
        """Evaluate the policy that `engine` holds.

        examples: to use instead of those of the tasks, by the names of `sources`. rollout: the number of rollouts learned from.
        Raises UserError if a metric of a set has the name of another metric.
        """
        parts, found = [], {}
        for name, (source, split) in self.sources(task).items():
            rows = self.chosen(examples[name] if examples else source.examples(split))
            batches = self.batches(len(rows))
            groups = [group for some in batches for group in self.one_batch(source, engine, renderer, seed, rows, some)]
            more, own = columns(source, groups, self.by), name == self.split
            these = estimates(pd.DataFrame(records(groups, **more)), self.equal)
            these = these if own else {f"{name}/{metric}": estimate for metric, estimate in these.items()}
            if twice := found.keys() & these.keys():
                raise UserError(f"eval.sets.{name}: eval/{min(twice)} is another metric already: rename the set")
            found |= these
            if self.sets:
                more["set"] = [[None if own else name] * len(group) for group in groups]
            parts.append((groups, more))
        groups = [group for groups, _ in parts for group in groups]
        return Evaluation(rollout, groups, found, in_one(parts))


def in_one(parts: Sequence[tuple[Sequence[Group], Mapping[str, list[list[Any]]]]]) -> dict[str, list[list[Any]]]:
    """Return the columns of several (groups, columns) as those of all groups, with None where a part lacks a column."""
    joined: dict[str, list[list[Any]]] = {name: [] for _, more in parts for name in more}
    for groups, more in parts:
        empty = [[None] * len(group) for group in groups]
        for name in joined:
            joined[name] += more.get(name, empty)
    return joined
