"""Makes rollouts, from prompts to scored groups. Knows nothing of Lightning, losses or the policy's weights."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from grpo.data.prompts import Loader
from grpo.engines.protocol import Engine
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Task
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.collate import scores
from grpo.rollout.episodes import Play, play
from grpo.rollout.samples_table import on_disk
from grpo.rollout.source.protocol import is_source
from grpo.rollout.types import Group, Plan
from grpo.system.distributed import in_play
from grpo.system.errors import RewardError, RolloutError
from grpo.system.progress import set_progress
from grpo.system.seeds import TRAIN, derive_seed


@dataclass(frozen=True)
class Rollout:
    """The groups sampled for one rollout.

    scores: their shaped rewards. rounds: rounds of sampling. version: the engine's weights at the start. seconds: its duration.
    """

    groups: list[Group]
    scores: Scores
    rounds: int
    version: int
    seconds: float

    def best(self, prompts: int, by: str) -> list[int]:
        """Return the indices of groups to learn from: all of one round, of several at most `prompts`, with signal `by` first."""
        order = (~self.scores.has_signal(by)).int().argsort(stable=True)
        return sorted(order[: prompts if self.rounds > 1 else None].tolist())

    def staleness(self, rollouts: int) -> float:
        """Return the age of the weights that sampled a token, in versions before `rollouts`, on average over tokens."""
        completions = [turn.completion for group in self.groups for sample in group for turn in sample.turns]
        drawn = [c.versions or (self.version,) * len(c.ids) for c in completions]
        return sum(rollouts * len(versions) - sum(versions) for versions in drawn) / max(1, sum(map(len, drawn)))


@dataclass(eq=False)
class Rollouts:
    """Makes rollout r, which depends only on (seed, r) and on the engine's weights. Mutable: the trainer sets `sampling`.

    folder: the run's folder, where the samples of a failed rollout are saved. sampling: the context in which the engine samples.
    """

    plan: Plan
    task: Task | None
    loader: Loader  # or a `Source`
    engine: Engine
    renderer: Renderer
    algorithm: Algorithm
    folder: str
    seed: int
    play: Play = play
    sampling: Callable[[], AbstractContextManager] = nullcontext

    def make(self, r: int) -> Rollout:
        """Play rollout r, in rounds until enough groups have signal (dynamic sampling of DAPO, arXiv 2503.14476)."""
        set_progress(r, self.plan.num_rollouts)
        begun, version = time.perf_counter(), self.engine.version
        groups: list[Group] = []
        rounds, prompts = 0, self.plan.prompts
        wanted = prompts
        with in_play(), self.sampling(), on_disk(Path(self.folder, "rollouts", f"{r + 1:06d}.failed.parquet")):
            while rounds < self.algorithm.sampling_rounds and (more := self.more(r, min(wanted, prompts), len(groups))):
                groups += more
                rounds += 1
                scored = self.algorithm.shaped(scores(groups))
                live = int(scored.has_signal(self.algorithm.sampling_filter).sum())
                if live >= prompts:
                    break
                wanted = math.ceil((prompts - live) * len(groups) / max(live, 1))  # new ones may have equal rewards too
        return Rollout(groups, scored, rounds, version, time.perf_counter() - begun)

    def more(self, r: int, count: int, first: int) -> list[Group]:
        """Return `count` groups of rollout r after the `first` ones, or all that are left."""
        if is_source(self.loader):
            return self.loader.groups(r, count, first, self)
        examples = self.loader.more(r, count, skip=first - self.plan.prompts) if first else self.loader.batch(r)
        return self.one_round(r, examples, first) if examples else []

    def one_round(self, r: int, examples: list[Example], first: int) -> list[Group]:
        """Play one round of rollout r. first: the number of groups that earlier rounds have played."""

        def seeds(p: int, *path: int) -> int:
            return derive_seed(self.seed, TRAIN, r, first + p, *path)

        size, sampling, limits = self.plan.group_size, self.plan.sampling, self.plan.limits
        try:
            return self.play(self.task, examples, size, self.engine, self.renderer, sampling, seeds, limits)
        except RolloutError as error:
            if isinstance(error, RewardError) or not first:
                raise
            return error.groups  # all environments of a later round failed, which may be only one or two
