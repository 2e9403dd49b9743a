"""Makes rollouts, from prompts to scored groups. Knows nothing of Lightning, losses or the policy's weights."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from grpo.data.prompts import Sampler
from grpo.engines.protocol import Engine
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Task
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.collate import scores
from grpo.rollout.episodes import ENVIRONMENT, Play, play
from grpo.rollout.samples_table import on_disk
from grpo.rollout.source.protocol import is_source
from grpo.rollout.types import Group, Plan
from grpo.system.distributed import in_play
from grpo.system.errors import RewardError, RolloutError
from grpo.system.progress import Progress, progress, set_progress
from grpo.system.seeds import TRAIN, derive_seed

GREEDY = 1 << 30  # used instead of the sample for the seeds of greedy answers


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

    def staleness(self, rollouts: int) -> float:
        """Return the age of the weights that sampled a token, in versions before `rollouts`, on average over tokens."""
        completions = [turn.completion for group in self.groups for sample in group for turn in sample.turns]
        drawn = [c.versions or (self.version,) * len(c.ids) for c in completions]
        return sum(rollouts * len(versions) - sum(versions) for versions in drawn) / max(1, sum(map(len, drawn)))


class Selection(Protocol):
    """The slot `selection`: plays a rollout, and says which groups the policy learns from. selection.py has them. With
    `state_dict` and `load_state_dict` it is resumed as it was; `check(plan, algorithm)` may refuse a run."""

    def select(self, draw: "Draw") -> list[Group]:
        """Return the groups to learn from. Those of `draw`, or others; their samples may be fewer."""


class Everything:
    """All groups of one round."""

    def select(self, draw: "Draw") -> list[Group]:
        """Return a group for each prompt of the rollout."""
        return draw.more(draw.prompts)


@dataclass(eq=False)
class Rollouts:
    """Makes rollout r, which depends only on (seed, r), on the engine's weights, and on the states of sampler and selection.
    Mutable: the trainer sets `sampling`.

    folder: the run's folder, where the samples of a failed rollout are saved. sampling: the context in which the engine samples.
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
    sampling: Callable[[], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        if check := getattr(self.selection, "check", None):
            check(self.plan, self.algorithm)

    def make(self, r: int) -> Rollout:
        """Play rollout r, select the groups to learn from, and tell the sampler what became of its prompts."""
        set_progress(r, self.plan.num_rollouts)
        begun, version, draw = time.perf_counter(), self.engine.version, Draw(self, r)
        with in_play(), self.sampling(), on_disk(Path(self.folder, "rollouts", f"{r + 1:06d}.failed.parquet")):
            groups = self.selection.select(draw)
            scored = draw.scores(groups)
        if observe := getattr(self.sampler, "observe", None):
            observe([(group[0].example, [sample.reward for sample in group]) for group in draw.played if group])
        all_scores = scored if groups == draw.played else draw.scores(draw.played)
        return Rollout(groups, scored, draw.played, all_scores, draw.rounds, version, time.perf_counter() - begun)

    def one_round(
        self, r: int, examples: Sequence[Example], places: Sequence[int], size: int, skip: int = 0, **sampling
    ) -> list[Group]:
        """Play samples of rollout r. places: of the examples in the rollout. size: samples of each. skip: samples of them that
        were played before. sampling: what differs from the run's."""

        def seeds(p: int, s: int, turn: int) -> int:
            return derive_seed(self.seed, TRAIN, r, places[p], s if s == ENVIRONMENT else s + skip, turn)

        settings = replace(self.plan.sampling, **sampling) if sampling else self.plan.sampling
        return self.play(self.task, examples, size, self.engine, self.renderer, settings, seeds, self.plan.limits)


class Draw:
    """What a selection may ask for while it makes rollout r. played: all groups so far; rounds: how often prompts were drawn."""

    def __init__(self, rollouts: Rollouts, r: int) -> None:
        self.rollouts, self.r = rollouts, r
        self.prompts, self.size, self.seed = rollouts.plan.prompts, rollouts.plan.group_size, rollouts.seed
        self.played: list[Group] = []
        self.rounds = 0

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return progress()

    def scores(self, groups: Sequence[Group]) -> Scores:
        """Return the shaped rewards of groups."""
        return self.rollouts.algorithm.shaped(scores(groups))

    def more(self, count: int, size: int | None = None) -> list[Group]:
        """Play `count` new prompts, or all that are left, with `size` samples each (None: the run's number)."""
        makes, first = self.rollouts, len(self.played)
        if is_source(makes.sampler):
            groups = makes.sampler.groups(self.r, count, first, makes)
        else:
            examples = makes.sampler.draw(self.r, count, first)
            groups = self._round(examples, range(first, first + len(examples)), size or self.size) if examples else []
        self.rounds += bool(groups)
        self.played += groups
        return groups

    def extend(self, groups: Sequence[Group], more: int) -> list[Group]:
        """Play `more` further samples of each of these groups, which `more` gave, and return the larger groups."""
        places = [next(i for i, played in enumerate(self.played) if played is group) for group in groups]
        if not places or not more:
            return list(groups)
        examples = [group[0].example for group in groups]
        for place, further in zip(places, self._round(examples, places, more, len(groups[0])), strict=True):
            self.played[place] = self.played[place] + further
        return [self.played[place] for place in places]

    def greedy(self, groups: Sequence[Group]) -> list[Group]:
        """Return a group of one greedy answer to each group's prompt. They are not among the played ones."""
        places = [next((i for i, played in enumerate(self.played) if played is group), 0) for group in groups]
        return self.rollouts.one_round(
            self.r, [group[0].example for group in groups], places, 1, GREEDY, temperature=0.0
        )

    def _round(self, examples: Sequence[Example], places: Sequence[int], size: int, skip: int = 0) -> list[Group]:
        try:
            return self.rollouts.one_round(self.r, examples, places, size, skip)
        except RolloutError as error:
            if isinstance(error, RewardError) or not self.played:
                raise
            return error.groups  # all environments of a later round failed, which may be only one or two
