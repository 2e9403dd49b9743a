"""The slot `selection`, and the `Draw` by which a selection plays a rollout. extras/selection has more."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo.env.types import Example
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.collate import scores
from grpo.rollout.types import Group, Plan
from grpo.system.errors import RewardError, RolloutError, UserError
from grpo.system.progress import Progress, progress
from grpo.system.seeds import set_states, states_of

# not a generator of its own: a greedy answer must not move the seeds of the samples
GREEDY_SAMPLE = 1 << 30  # the number of a sample that seeds a greedy answer; no real sample has it


class Selection(Protocol):
    """The slot `selection`: plays a rollout, and says which groups the policy learns from. With
    `state_dict` and `load_state_dict` it is resumed as it was; `check(plan, algorithm)` may refuse a run."""

    def select(self, draw: "Draw") -> list[Group]:
        """Return the groups to learn from: those of `draw` or others, with all of their samples or with some."""


class Everything:
    """All groups of one round."""

    def select(self, draw: "Draw") -> list[Group]:
        """Return a group for each prompt of the rollout."""
        return draw.more(draw.prompts)


class Outer:
    """The base of a selection that works on the groups of another one, `inner`, whose check and state it includes."""

    inner: Selection

    def check(self, plan: Plan, algorithm: Algorithm) -> None:
        """Raise UserError if a run of this plan and algorithm cannot have such selections."""
        if check := getattr(self.inner, "check", None):
            check(plan, algorithm)

    def state_dict(self) -> dict[str, Any]:
        return states_of({"inner": self.inner})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_states({"inner": self.inner}, {"inner": state["inner"]} if state.get("inner") else {})


def is_source(sampler: Any) -> bool:
    """Return whether a run's `sampler` is a Source, which gives groups that others have played, and no Sampler."""
    return hasattr(sampler, "groups")


class Draw:
    """Makes rollout r for a selection: draws prompts and plays them. played: all groups so far; rounds: how often prompts were
    drawn. It knows no engine and no task:

    deal: from (count, first) to at most `count` new prompts, those after the `first` ones; of a source to groups.
    play: from (examples, places, size, skip, **sampling) to a group for each example; None: a source has played them.
    """

    def __init__(
        self, r: int, plan: Plan, seed: int, algorithm: Algorithm, deal: Callable[..., Any], play: Callable | None
    ) -> None:
        self.r, self.seed, self.prompts, self.size = r, seed, plan.prompts, plan.group_size
        self.algorithm, self.deal, self.play = algorithm, deal, play
        self.temperatures = plan.sampling.temperatures
        self.played: list[Group] = []
        self.rounds = 0

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return progress()

    def scores(self, groups: Sequence[Group]) -> Scores:
        """Return the shaped rewards of groups."""
        return self.algorithm.shaped(scores(groups))

    def more(self, count: int, size: int | None = None, temperatures: Sequence[float] = ()) -> list[Group]:
        """Play `count` new prompts, or all that are left, with `size` samples each (None: the run's number). temperatures: of the
        samples of a group in turn; none: the run's."""
        first = len(self.played)
        groups = self.deal(count, first)  # of a sampler they are prompts
        if self.play and groups:
            places, own = range(first, first + len(groups)), {"temperatures": temperatures} if temperatures else {}
            groups = self._round(groups, places, size or self.size, **own)
        self.rounds += bool(groups)
        self.played += groups
        return groups

    def extend(self, groups: Sequence[Group], more: int, temperatures: Sequence[float] = ()) -> list[Group]:
        """Play `more` further samples of each of these groups, which `more` gave, and return the larger groups. temperatures: of
        these samples in turn; none: the run's, which go on where they ended."""
        places = [next(i for i, played in enumerate(self.played) if played is group) for group in groups]
        if not places or not more:
            return list(groups)
        examples, size = [group[0].example for group in groups], len(groups[0])
        if several := self.temperatures:
            after = size % len(several)
            temperatures = temperatures or [*several[after:], *several[:after]]
        own = {"temperatures": temperatures} if temperatures else {}
        for place, further in zip(places, self._round(examples, places, more, size, **own), strict=True):
            self.played[place] = self.played[place] + further
        return [self.played[place] for place in places]

    def greedy(self, groups: Sequence[Group]) -> list[Group]:
        """Return a group of one greedy answer to each group's prompt. They are not among the played ones."""
        examples = [group[0].example for group in groups]
        return self._round(examples, range(len(groups)), 1, GREEDY_SAMPLE, temperature=0.0)

    def _round(
        self, examples: Sequence[Example], places: Sequence[int], size: int, skip: int = 0, **sampling
    ) -> list[Group]:
        if not self.play:
            raise UserError(
                "this selection plays further samples itself, which a source cannot: set selection=all or dynamic"
            )
        try:
            return self.play(examples, places, size, skip, **sampling)
        except RolloutError as error:
            if isinstance(error, RewardError) or not self.played:
                raise
            return error.groups  # all environments of a later round failed, which may be only one or two
