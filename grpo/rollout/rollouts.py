"""Makes rollouts, from prompts to scored groups. Knows nothing of Lightning, losses or the policy's weights."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo.data.prompts import Sampler
from grpo.engines.protocol import Engine
from grpo.env.rendering import Renderer
from grpo.env.types import Example, Task
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.draw import Draw, Everything, Selection, is_source
from grpo.rollout.episodes import ENVIRONMENT, Play, play
from grpo.rollout.samples_table import saving_failures
from grpo.rollout.types import Group, Plan
from grpo.system.distributed import in_play
from grpo.system.progress import set_progress
from grpo.system.seeds import TRAIN, derive_seed


@dataclass(frozen=True)
class Rollout:
    """The groups of one rollout.

    groups: those to learn from, with their shaped rewards, `scores`. played: all groups that were sampled for it, with
    `all_scores`. rounds: rounds of sampling. version: the engine's weights at the start. seconds: its duration.
    """

    groups: list[Group]
    scores: Scores
    played: list[Group]
    all_scores: Scores
    rounds: int
    version: int
    seconds: float

    @property
    def discarded(self) -> list[Group]:
        """The groups of which no sample is learned from."""
        kept = {id(sample.trajectory) for group in self.groups for sample in group}
        return [group for group in self.played if all(id(sample.trajectory) not in kept for sample in group)]


@dataclass(eq=False)
class Rollouts:
    """Makes rollout r, which depends only on (seed, r), on the engine's weights, and on the states of sampler and selection.

    Mutable: the trainer sets `while_sampling`, the context in which it samples. folder: where a failed rollout is saved.
    """

    plan: Plan
    task: Task | None
    sampler: Sampler  # or a `Source`
    engine: Engine
    renderer: Renderer
    algorithm: Algorithm
    folder: str
    seed: int
    play: Play = play
    selection: Selection = field(default_factory=Everything)
    while_sampling: Callable[[], AbstractContextManager] = nullcontext
    recipe: str = ""  # a digest of all other settings that make the samples

    def __post_init__(self) -> None:
        if check := getattr(self.selection, "check", None):
            check(self.plan, self.algorithm)

    @property
    def objects(self) -> dict[str, Any]:
        """The user's objects that may have a state, which a rollout or its update changes."""
        names = "task", "sampler", "selection"
        return {name: getattr(self, name) for name in names} | {"advantage": self.algorithm.advantage}

    def make(self, r: int) -> Rollout:
        """Play rollout r, select the groups to learn from, and tell the sampler what became of its prompts."""
        set_progress(r, self.plan.num_rollouts)
        begun, version, parts = time.perf_counter(), self.engine.version, (r, self.plan, self.seed, self.algorithm)
        if is_source(self.sampler):
            draw = Draw(*parts, lambda count, first: self.sampler.groups(r, count, first, self), None)
        else:
            draw = Draw(*parts, partial(self.sampler.draw, r), partial(self.one_round, r))
        with (
            in_play(),
            self.while_sampling(),
            saving_failures(Path(self.folder, "rollouts", f"{r + 1:06d}.failed.parquet")),
        ):
            groups = self.selection.select(draw)
            scored = draw.scores(groups)
        if observe := getattr(self.sampler, "observe", None):
            observe([(group[0].example, [sample.reward for sample in group]) for group in draw.played if group])
        all_scores = scored if groups == draw.played else draw.scores(draw.played)
        return Rollout(groups, scored, draw.played, all_scores, draw.rounds, version, time.perf_counter() - begun)

    def one_round(
        self, r: int, examples: Sequence[Example], places: Sequence[int], size: int, skip: int = 0, **own: Any
    ) -> list[Group]:
        """Play samples of rollout r. places: of the examples in the rollout. size: samples of each. skip: samples of them that
        were played before. own: `play`, who plays them, and what else differs from the run's sampling."""

        def seeds(p: int, s: int, turn: int) -> int:
            return derive_seed(self.seed, TRAIN, r, places[p], s if s == ENVIRONMENT else s + skip, turn)

        play = own.pop("play", self.play)
        sampling = replace(self.plan.sampling, **own) if own else self.plan.sampling
        return play(self.task, examples, size, self.engine, self.renderer, sampling, seeds, self.plan.limits)
