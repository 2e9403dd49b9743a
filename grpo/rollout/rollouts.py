"""A rollout from prompts to scored groups. Knows nothing of Lightning, losses or the policy's weights."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from grpo.data.prompts import PromptLoader
from grpo.engines.protocol import Engine
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Task
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.collate import scores
from grpo.rollout.episodes import play
from grpo.rollout.samples_table import on_disk
from grpo.rollout.types import Group, Plan
from grpo.system.errors import RewardError, RolloutError
from grpo.system.seeds import TRAIN, derive_seed


@dataclass(frozen=True)
class Rollout:
    """All groups that were sampled for a rollout, and what they earned; in how many rounds; the version of the weights that the
    engine held when it began; the seconds it took."""

    groups: list[Group]
    scores: Scores
    rounds: int
    version: int
    seconds: float

    def best(self, prompts: int) -> list[int]:
        """The groups to learn from, by index, in order: at most `prompts`, those with a signal before the others."""
        order = (~self.scores.has_signal()).int().argsort(stable=True)
        return sorted(order[:prompts].tolist())

    def staleness(self, rollouts: int) -> float:
        """Versions between the weights that drew a token and those that learn from it, `rollouts`; the mean over all tokens."""
        completions = [turn.completion for group in self.groups for sample in group for turn in sample.turns]
        drawn = [c.versions or (self.version,) * len(c.ids) for c in completions]
        return sum(rollouts * len(versions) - sum(versions) for versions in drawn) / max(1, sum(map(len, drawn)))


@dataclass(eq=False)
class Rollouts:
    """Makes rollout r, a function of (seed, r) and the weights that the engine holds. Mutable: the trainer sets `autocast`.

    folder: of the run; a rollout whose reward fails is kept there. autocast: in which the engine samples.
    """

    plan: Plan
    task: Task
    loader: PromptLoader
    engine: Engine
    renderer: Renderer
    algorithm: Algorithm
    folder: str
    seed: int
    autocast: Callable[[], AbstractContextManager] = nullcontext

    def make(self, r: int) -> Rollout:
        """Plays rollout r. With algo.sampling_rounds above 1 it plays further prompts until enough groups have a signal, or the
        rounds are over (dynamic sampling, DAPO, arXiv 2503.14476); `Rollout.best` then picks the groups to learn from."""
        begun, version = time.perf_counter(), self.engine.version
        groups: list[Group] = []
        examples, rounds, prompts = self.loader.batch(r), 0, self.plan.prompts
        with self.autocast(), on_disk(Path(self.folder, "rollouts", f"{r + 1:06d}.failed.parquet")):
            while examples and rounds < self.algorithm.sampling_rounds:
                groups += self.play(r, examples, first=len(groups))
                rounds += 1
                scored = self.algorithm.shaped(scores(groups))
                live = int(scored.has_signal().sum())
                if live >= prompts:
                    break
                wanted = math.ceil((prompts - live) * len(groups) / max(live, 1))  # some will be of no use again
                examples = self.loader.more(r, min(wanted, prompts), skip=len(groups) - prompts)
        return Rollout(groups, scored, rounds, version, time.perf_counter() - begun)

    def play(self, r: int, examples: list[Example], first: int) -> list[Group]:
        """One round of rollout r, in which `first` groups were played before."""

        def seeds(p: int, *path: int) -> int:
            return derive_seed(self.seed, TRAIN, r, first + p, *path)

        size, sampling, limits = self.plan.group_size, self.plan.sampling, self.plan.limits
        try:
            return play(self.task, examples, size, self.engine, self.renderer, sampling, seeds, limits)
        except RolloutError as error:
            if isinstance(error, RewardError) or not first:
                raise
            return error.groups  # all environments of a later round, which may be one or two, failed
