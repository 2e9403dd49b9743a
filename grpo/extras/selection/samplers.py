"""Samplers that prefer some examples. `Weighted` draws; a weight function says what each example weighs.

A weight function returns weights [n], one for each example; an example of weight 0 is never drawn. Its parameters name what it
gets of WEIGHED_BY: a `History`, or its parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np

from grpo.data.rows import fingerprint
from grpo.env.types import Example, Reward
from grpo.rewards.resolve import imported
from grpo.system.errors import RolloutError, UserError, error_line
from grpo.system.output.users_code import code_name
from grpo.system.progress import Progress, progress
from grpo.system.ranges import NonNegative, Share, enforced

WEIGHED_BY = ("history", "examples", "rewards", "solved", "progress")


@dataclass(frozen=True)
class History:
    """The outcomes of n examples so far. latest: by index, the mean reward and the share of right answers of the latest group.
    progress: how far the run is. columns: those that were read."""

    examples: Sequence[Example]
    latest: Mapping[int, tuple[float, float]]
    progress: Progress
    columns: dict[str, list] = field(default_factory=dict)

    @cached_property
    def rewards(self) -> np.ndarray:
        """The mean reward of each example's latest group, [n]; NaN if it was never asked."""
        return self._latest(0)

    @cached_property
    def solved(self) -> np.ndarray:
        """The share of right answers in each example's latest group, [n]; NaN if it was never asked."""
        return self._latest(1)

    def column(self, name: str) -> list:
        """Return a column of the examples, [n]; None where a row lacks it. It is read once."""
        if name not in self.columns:
            self.columns[name] = [example.get(name) for example in self.examples]
        return self.columns[name]

    def _latest(self, place: int) -> np.ndarray:
        values = np.full(len(self.examples), np.nan)
        values[[*self.latest]] = [outcome[place] for outcome in self.latest.values()]
        return values


class Weighted:
    """Draws examples with chances in proportion to their weights, each at most once in a rollout while there are enough.

    weight: a weight function, or FILE.py:NAME of one. Mutable: keeps the latest rewards of every example, which are its state.
    """

    def __init__(
        self, examples: Sequence[Example], size: int, seed: int, weight: Callable[[History], np.ndarray] | str
    ) -> None:
        self.weight = imported(weight, "the weight function") if isinstance(weight, str) else weight
        self.examples, self.size, self.seed = examples, size, seed
        self.latest: dict[int, tuple[float, float]] = {}
        self.columns: dict[str, list] = {}
        self.drawn: dict[str, int] = {}  # the indices of this rollout's examples, by fingerprint

    @property
    def history(self) -> History:
        """The outcomes of the examples so far."""
        return History(self.examples, self.latest, progress(), self.columns)

    def weights(self) -> np.ndarray:
        """Return the weight of each example, [n]. Raises RolloutError, which saves a checkpoint, if all are 0."""
        weights = np.asarray(weighed(self.weight, self.history), dtype=float)
        count = len(self.examples)
        if weights.shape != (count,) or not (weights >= 0).all():
            needed = f"{count} numbers that are not negative, one for each example"
            shown = f"{weights.shape}" if weights.shape != (count,) else f"{weights.min()}"
            raise RolloutError(f"sampler.weight ({code_name(self.weight)}) must return {needed}, and gave {shown}")
        if not weights.any():
            fix = "raise a weight or end the run"
            raise RolloutError(f"sampler: all examples have weight 0, so none can be drawn; {fix}")
        return weights

    def draw(self, rollout: int, count: int, first: int = 0) -> list[Example]:
        """Return `count` examples. If fewer have a weight above 0, the first ones of a rollout come more than once."""
        weights = self.weights()
        able = int(np.count_nonzero(weights))
        rounds = 1 if first else (count + able - 1) // able  # each draws every example with a weight once
        order: list[int] = []
        for again in range(rounds):
            noise = np.random.default_rng([self.seed, rollout, again]).gumbel(size=len(weights))
            with np.errstate(divide="ignore"):
                scores = np.log(weights) + noise  # arXiv 1903.06059
            order += map(int, np.argsort(-scores, kind="stable")[:able])
        self.drawn = {} if not first else self.drawn
        chosen = order[first : first + count]
        examples = [self.examples[i] for i in chosen]
        self.drawn |= {fingerprint(example): i for i, example in zip(chosen, examples, strict=True)}
        return examples

    def observe(self, results: Sequence[tuple[Example, Sequence[Reward]]]) -> None:
        """Note the rewards of each group; a group without a known reward changes nothing."""
        for example, rewards in results:
            valid = [reward for reward in rewards if reward.known]
            i = self.drawn.get(fingerprint(example))
            if valid and i is not None:
                mean = float(np.mean([reward.value for reward in valid]))
                solved = float(np.mean([reward.correct for reward in valid]))
                self.latest[i] = mean, solved

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts: prompts, and the shares of examples that were asked, and that can be drawn."""
        count = len(self.examples)
        able = np.count_nonzero(weighed(self.weight, self.history))
        shares = {"data/asked": len(self.latest) / count, "data/drawable": able / count}
        return {"data/prompts": float(rollouts * self.size), **shares}

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self.latest, "rows": {i: fingerprint(self.examples[i]) for i in self.latest}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the outcomes of an earlier run. Where the rows are others now, an outcome goes with its row."""
        rows, count = state.get("rows", {}), len(self.examples)
        if all(i < count and fingerprint(self.examples[i]) == row for i, row in rows.items()):
            self.latest = dict(state["latest"])
        else:
            places = {fingerprint(example): i for i, example in enumerate(self.examples)}
            self.latest = {places[row]: state["latest"][i] for i, row in rows.items() if row in places}


def weighed(function: Callable[..., Any], history: History) -> np.ndarray:
    """Return what a weight function gives, as numbers. Raises UserError for a parameter without a value, and RolloutError, which
    saves a checkpoint, where the function fails."""
    name, parameters = f"sampler.weight ({code_name(function)})", signature(function).parameters
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (2, 4)  # *args, **kwargs
        if needed and parameter.name not in WEIGHED_BY:
            raise UserError(f"{name} needs {parameter.name!r}; a weight function may name {', '.join(WEIGHED_BY)}")
    offered = {
        each: history if each == "history" else getattr(history, each) for each in WEIGHED_BY if each in parameters
    }
    try:
        return np.asarray(function(**offered), dtype=float)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RolloutError(f"{name} raised {error_line(error)}") from error


def by_column(history: History, name: str) -> np.ndarray:
    """The weight is the number in a column."""
    try:
        return np.array([float(value) for value in history.column(name)])
    except (TypeError, ValueError) as error:
        raise UserError(f"sampler.weight.name={name}: each row needs a number in this column ({error})") from error


@enforced("sampler.weight")
def pools(
    history: History,
    thresholds: Sequence[float] = (0.25, 0.75),
    weights: Sequence[NonNegative] = (1.0, 2.0, 0.5),
    unseen: NonNegative = 1.0,
) -> np.ndarray:
    """Pools by the latest share of right answers, as in prime-rl: an example is in the first pool whose threshold is at least its
    share, else in the last pool. weights: one for each pool, so one more than thresholds. unseen: for examples that were
    never asked."""
    if len(weights) != len(thresholds) + 1 or sorted(thresholds) != [*thresholds]:
        fix = "thresholds rise, and weights has one number more than thresholds"
        raise UserError(f"sampler.weight: thresholds={[*thresholds]} weights={[*weights]} do not fit: {fix}")
    pool = np.searchsorted(np.asarray(thresholds, dtype=float), history.solved)
    weight = np.asarray(weights, dtype=float)[pool]
    return np.where(np.isnan(history.solved), unseen, weight)


@enforced("sampler.weight")
def learning_signal(history: History, floor: Share = 0.1) -> np.ndarray:
    """4 p (1 - p), the variance of right and wrong answers, 1 at p = 1/2: examples that teach most come more often. p: the latest
    share of right answers; unseen examples weigh 1. floor: the smallest weight, so that no example is given up."""
    signal = np.maximum(4 * history.solved * (1 - history.solved), floor)
    return np.where(np.isnan(history.solved), 1.0, signal)


@dataclass(frozen=True)
class Stage:
    """A stage of a curriculum: the rows whose column has one of these values. It ends when either is reached: `until`, a share of
    the run, or `reach`, the mean share of right answers of its rows that were asked, once `asked` of them were."""

    values: Sequence[Any]
    until: Share | None = None
    reach: Share | None = None
    asked: int = 16

    def over(self, rows: np.ndarray, history: History) -> bool:
        """Return whether the stage has ended. rows: [n] bool, its rows."""
        shares = history.solved[rows & ~np.isnan(history.solved)]
        reached = self.reach is not None and len(shares) >= self.asked and shares.mean() >= self.reach
        return bool(reached or (self.until is not None and history.progress.share >= self.until))


def staged(history: History, name: str, stages: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Stages, one after another: an example weighs 1 in its stage, else 0. name: the column that stages look at. stages: the
    fields of `Stage`; the last one needs no end. Each rollout starts the search at the first stage, so training goes back to
    a stage whose rows the policy has forgotten."""
    values = history.column(name)
    for i, settings in enumerate(stages):
        stage = Stage(**settings)
        rows = np.array([value in stage.values for value in values])
        if not rows.any():
            present = ", ".join(sorted({str(value) for value in values})[:8])
            raise UserError(f"sampler.weight.stages: no row has {name} in {[*stage.values]}; there are {present}")
        if i == len(stages) - 1 or not stage.over(rows, history):
            return rows.astype(float)
    raise UserError("sampler.weight.stages is empty: name at least one stage, such as {values: [easy], reach: 0.8}")
