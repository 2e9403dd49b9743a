"""Selections: which groups, and which of their samples, the policy learns from. conf/selection has each of them.

A selection with `inner` works on the groups that another one gives, so they combine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from grpo.objectives.algorithm import Algorithm
from grpo.objectives.refusals import check_age
from grpo.rollout.draw import Draw, Everything, Outer, Selection
from grpo.rollout.types import Group, Plan, Sample
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Share, enforced
from grpo.system.seeds import REPLAY

Signal = Literal["correct", "reward"]


@enforced("selection")
@dataclass(frozen=True)
class Dynamic:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups without signal are replaced, in at most `rounds` rounds of sampling.

    by: a group has signal if right and wrong answers are in it (correct), or if its rewards differ (reward). low, high: bounds on
    the group's mean of these numbers, outside of which it has no signal (prime-rl's gates); None: no bound.
    """

    rounds: Count = 10
    by: Signal = "correct"
    low: float | None = None
    high: float | None = None

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError for groups of one sample."""
        if plan.group_size == 1:
            raise UserError("rollout.group_size=1: dynamic sampling would discard every group; set selection=all")

    def live(self, draw: Draw, groups: list[Group]) -> Tensor:
        """Return which groups have signal, [N] bool."""
        scored = draw.scores(groups)
        values = scored.rewards if self.by == "reward" else scored.parts["correct"]
        means = values.nanmean(1)
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return scored.has_signal(self.by) & (means >= low) & (means <= high)

    def select(self, draw: Draw) -> list[Group]:
        """Return all groups of one round; of several, as many as the rollout has prompts, those with signal first."""
        groups: list[Group] = []
        wanted = draw.prompts
        while draw.rounds < self.rounds and (more := draw.more(min(wanted, draw.prompts))):
            groups += more
            live = self.live(draw, groups)
            if (count := int(live.sum())) >= draw.prompts:
                break
            # new ones may have equal rewards too
            wanted = math.ceil((draw.prompts - count) * len(groups) / max(count, 1))
        if draw.rounds < 2:
            return groups
        best = (~live).int().argsort(stable=True)[: draw.prompts]
        return [groups[i] for i in sorted(best.tolist())]


@enforced("selection")
@dataclass(frozen=True)
class WithSignal(Outer):
    """Leaves out groups without signal, and plays no others for them, as `Dynamic` would: ScaleRL's filter, arXiv 2510.13786.
    They are in no mean of the loss, so the others weigh more. If all would go, all stay, and teach nothing."""

    by: Signal = "reward"
    inner: Selection = field(default_factory=Everything)

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError for groups of one sample."""
        super().check(plan, algorithm)
        if plan.group_size == 1:
            raise UserError("rollout.group_size=1: every group would be left out; set selection=all")

    def select(self, draw: Draw) -> list[Group]:
        """Return the inner selection's groups that have signal."""
        groups = self.inner.select(draw)
        live = draw.scores(groups).has_signal(self.by).tolist() if groups else ()
        return [group for group, is_live in zip(groups, live, strict=True) if is_live] or groups


@enforced("selection")
@dataclass(frozen=True)
class Screened:
    """SPEED (arXiv 2506.09016): `first` samples of a prompt show whether it is worth the others. Prompts whose first answers are
    all right or all wrong get no more samples, and others take their place, in at most `rounds` rounds."""

    first: Count = 4
    rounds: Count = 10
    by: Signal = "correct"

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError for a first part that decides nothing."""
        if not 2 <= self.first < plan.group_size:
            limits = f"at least 2 and below rollout.group_size={plan.group_size}"
            raise UserError(f"selection.first={self.first} must be {limits}")

    def select(self, draw: Draw) -> list[Group]:
        """Return the prompts that passed, with all their samples; if there are none, what was played."""
        passed: list[Group] = []
        while draw.rounds < self.rounds and (more := draw.more(draw.prompts, self.first)):
            live = draw.scores(more).has_signal(self.by).tolist()
            passed += [group for group, is_live in zip(more, live, strict=True) if is_live]
            if len(passed) >= draw.prompts:
                break
        return draw.extend(passed[: draw.prompts], draw.size - self.first) or draw.played[: draw.prompts]


@enforced("selection")
@dataclass(frozen=True)
class Fewer(Outer):
    """Learns from `keep` samples of each group; the others are in no baseline. by:
    extremes    half with the highest and half with the lowest rewards (best and worst of n; arXiv 2504.13818)
    short       the shortest (GFPO, arXiv 2508.09726)
    efficient   those with the highest reward per token (the same paper); of equal ones, the shorter. With negative rewards, the
                reward counts from the lowest of the group
    Samples without a reward are never kept.
    """

    keep: Count
    by: Literal["extremes", "short", "efficient"] = "extremes"
    inner: Selection = field(default_factory=Everything)

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError if a group has fewer samples."""
        super().check(plan, algorithm)
        if self.keep > plan.group_size:
            raise UserError(f"selection.keep={self.keep} must be at most rollout.group_size={plan.group_size}")

    def select(self, draw: Draw) -> list[Group]:
        """Return the inner selection's groups with the samples that are kept, in their order."""
        groups = self.inner.select(draw)
        rewards = draw.scores(groups).rewards if groups else ()
        return [self.of(group, row.tolist()) for group, row in zip(groups, rewards, strict=True)]

    def of(self, group: Group, rewards: list[float]) -> Group:
        """Return the kept samples of one group. rewards: the shaped ones."""
        # a share of a negative reward would be a bonus
        lowest = min([0.0, *(reward for reward in rewards if not math.isnan(reward))])
        gains = [reward - lowest for reward in rewards]
        worth = {
            "extremes": lambda i: rewards[i],
            "short": lambda i: -group[i].length,
            "efficient": lambda i: (gains[i] / max(group[i].length, 1), -group[i].length),
        }[self.by]
        order = sorted((i for i in range(len(group)) if rewards[i] == rewards[i]), key=worth, reverse=True)
        best = math.ceil(self.keep / 2) if self.by == "extremes" else self.keep
        worst = self.keep - best  # it may be 0
        kept = order if len(order) <= self.keep else order[:best] + order[len(order) - worst :]
        return [group[i] for i in sorted(kept)] or group


@enforced("selection")
class Replay(Outer):
    """Learns again from groups with signal of earlier rollouts, each played at most `max_age` rollouts ago.

    A replayed token keeps the log-probability with which it was sampled. The ratio or the correction weighs it, so
    `algo.correction` or `algo.old_policy=rollout` is needed. Each group keeps its own baseline. share: at most this part of the
    rollout's prompts is added. by: what counts as signal. Mutable: its state is the groups.
    """

    def __init__(
        self,
        share: Share = 0.5,
        max_age: Count = 4,
        by: Signal = "reward",
        inner: Selection | None = None,
    ) -> None:
        self.share, self.max_age, self.by, self.inner = share, max_age, by, inner or Everything()
        self.kept: list[tuple[int, Group]] = []  # with the rollout in which each was played

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError for an objective that takes old samples as the policy's own."""
        super().check(plan, algorithm)
        check_age(algorithm, "selection=replay")

    def select(self, draw: Draw) -> list[Group]:
        """Return the inner selection's groups, then some of the kept ones, drawn with equal chances."""
        fresh = self.inner.select(draw)
        old = [(r, group) for r, group in self.kept if draw.r - r <= self.max_age]
        rng = np.random.default_rng([draw.seed, REPLAY, draw.r])
        count = min(len(old), int(self.share * draw.prompts))
        again = [old[i] for i in sorted(rng.choice(len(old), count, replace=False))]
        live = draw.scores(fresh).has_signal(self.by).tolist() if fresh else []
        self.kept = old + [(draw.r, group) for group, is_live in zip(fresh, live, strict=True) if is_live]
        return fresh + [[replace(sample, age=draw.r - r) for sample in group] for r, group in again]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = [(r, list(group)) for r, group in state.get("kept", ())]
        super().load_state_dict(state)


@dataclass(frozen=True)
class Greedy(Outer):
    """Also plays a greedy answer to each prompt, whose reward becomes the part `greedy` of every sample: the baseline of ReMax
    (arXiv 2310.10505)."""

    inner: Selection = field(default_factory=Everything)

    def select(self, draw: Draw) -> list[Group]:
        """Return the inner selection's groups with this part."""
        groups = self.inner.select(draw)
        return [
            [_with_part(sample, "greedy", answer.reward.value) for sample in group]
            for group, (answer,) in zip(groups, draw.greedy(groups) if groups else (), strict=True)
        ]


def _with_part(sample: Sample, name: str, value: float) -> Sample:
    return replace(sample, reward=replace(sample.reward, parts={**sample.reward.parts, name: value}))
