"""Environments played side by side, a group of samples for each example, and scored.

The engine is handed all episodes that wait for the policy, again and again. Environments and rewards work in threads of their
own meanwhile; one that is slow joins in when it is ready.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo.engines.protocol import Engine, Sampling
from grpo.env.messages import Message, message_of
from grpo.env.renderer import Renderer
from grpo.env.tokens import Completion, CompletionLike, Turn, completion_of
from grpo.env.types import Action, End, Env, Example, Reward, State, Step, Task, Trajectory, build, state_of
from grpo.rollout.calls import Calls
from grpo.rollout.rewarding import Scoring
from grpo.rollout.types import Group, Limits, Sample
from grpo.system import distributed
from grpo.system.errors import RewardError, RolloutError, UserError, told

ENVIRONMENT = 1 << 31  # in the place of the turn: the seed of the environment itself
UNKNOWN = Reward(math.nan, False)


class _Episode:
    """One environment and what has happened in it so far."""

    def __init__(self, make: Callable[[], Env]) -> None:
        self.make = make
        self.env: Env | None = None
        self.state: State | None = None  # what the policy is to answer; None while the environment is at work
        self.end: End | None = None
        self.last: State | None = None
        self.error: str | None = None
        self.steps: list[Step] = []
        self.turns: list[Turn] = []

    def begin(self) -> Any:
        self.env = self.make()
        return self.env.start()

    def act(self, prompt_ids: tuple[int, ...], completion: Completion, message: Message) -> Callable[[], Any]:
        """Note what the policy said. Returns what its environment is to do about it."""
        action = Action(message, completion.finish == "length", len(completion.ids))
        self.steps.append(Step(self.state, action))
        self.turns.append(Turn(prompt_ids, completion))
        self.state = None
        return partial(self.env.step, action)

    def meet(self, given: Any, max_turns: int) -> None:
        """Take what the environment gave: a state, None, or the exception that its call ended with."""
        truncated = bool(self.steps) and self.steps[-1].action.truncated
        state = None
        if not isinstance(given, BaseException) and not (given is None and self.steps):
            try:
                state = state_of(given)
            except BaseException as error:  # whatever a user's code does, sys.exit() too
                given = error
        if isinstance(given, BaseException):
            self.end, self.error = "env_timeout" if isinstance(given, TimeoutError) else "env_error", told(given)
        elif state is None:
            self.end = "truncated" if truncated else "answered"
        elif len(self.steps) >= max_turns:
            self.end, self.last = "truncated" if truncated else "out_of_turns", state
        else:
            self.state = state

    def prompt_ids(self, renderer: Renderer, room: float) -> tuple[int, ...] | None:
        """What the policy reads now; None where the conversation ends here: it has outgrown the model, or the environment made
        one of it that the chat template refuses."""
        before = self.turns[-1].ids if self.turns else ()
        try:
            ids = tuple(renderer.prompt_ids(self.state.messages, self.state.tools, before))
        except UserError as error:
            if not self.turns:  # so will be every other one
                raise
            self.end, self.error, self.last, self.state = "env_error", str(error), self.state, None
            return None
        if self.turns and len(ids) > room:
            self.end, self.last, self.state = "truncated", self.state, None
            return None
        return ids

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(tuple(self.steps), self.end, self.last, self.error)


def play(
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    seed: Callable[[int, int, int], int],
    limits: Limits | None = None,
) -> list[Group]:
    """Play `group_size` episodes of every example.

    seed: (index of the example, index of the sample, turn) to the seed of that one completion; in the place of the turn
    ENVIRONMENT gives the environment's own. Every rank plays its share of the examples. A group is scored as soon as its last
    episode is over, while others go on. Returns, on each rank, a group for every example, both in order. Raises RolloutError,
    with the groups as far as they got, where a reward fails, or every single environment.
    """
    limits = limits or Limits()
    room = math.inf if engine.context is None else engine.context - sampling.max_tokens
    mine = distributed.share(len(examples))
    # never shared: a fresh environment a sample
    played = {
        (p, s): _Episode(partial(build, task, examples[p], seed(p, s, ENVIRONMENT)))
        for p in mine
        for s in range(group_size)
    }
    going_on = dict.fromkeys(mine, group_size)  # episodes of each group

    def trajectories(p: int) -> list[Trajectory]:
        return [played[p, s].trajectory for s in range(group_size)]

    def among_all(p: int, scored: int | None) -> int | None:
        """Which sample it is that was scored in that place."""
        return None if scored is None else [s for s, t in enumerate(trajectories(p)) if not t.failed][scored]

    def met(place: tuple[int, int], given: Any) -> None:
        played[place].meet(given, limits.max_turns)
        if played[place].end is not None:
            over(place[0])

    def over(p: int) -> None:
        going_on[p] -= 1
        if going_on[p] == 0 and (known := [t for t in trajectories(p) if not t.failed]):
            scoring.start(p, examples[p], known)

    def one_turn() -> bool:
        """Let the policy answer every state there is; False where there is none, and none will come."""
        asked: dict[tuple[int, int], tuple[int, ...]] = {}
        with calls.lock:
            for place, episode in played.items():
                if episode.state is not None:
                    if (ids := episode.prompt_ids(renderer, room)) is not None:
                        asked[place] = ids
                    else:
                        over(place[0])
            more = bool(asked or calls.open)  # here: one that comes later has a state that nobody has seen
        places, prompts = list(asked), list(asked.values())
        taken = set()

        def take(i: int, given: CompletionLike) -> None:
            taken.add(i)
            episode, completion = played[places[i]], completion_of(given)
            message = message_of(renderer.parse(completion.ids, episode.state.tools))
            calls.start(places[i], episode.act(prompts[i], completion, message))

        seeds = [seed(p, s, len(played[p, s].turns)) for p, s in places]
        given = engine.sample(prompts, sampling, seeds, take) if places else ()
        for i, completion in zip(range(len(places)), given, strict=True):
            if i not in taken:  # an engine need not tell of each as it comes
                take(i, completion)
        return more

    with Scoring(task, limits.score_timeout) as scoring, Calls(limits.step_timeout, met) as calls:
        for place, episode in played.items():
            calls.start(place, episode.begin)
        calls.wait()
        while one_turn():
            calls.wait()
        rewards, errors = scoring.finish()

    groups: list[Group] = []
    for p in mine:
        given = iter(rewards.get(p, ()))  # a group whose reward failed may have fewer
        earned = [UNKNOWN if t.failed else next(given, UNKNOWN) for t in trajectories(p)]
        of_group = zip(trajectories(p), (played[p, s] for s in range(group_size)), earned, strict=True)
        groups.append([Sample(examples[p], t, tuple(e.turns), reward) for t, e, reward in of_group])
    groups = distributed.all_gather(groups)
    failed = distributed.all_gather([(p, str(error), among_all(p, error.sample)) for p, error in errors.items()])
    if failed:
        p, message, s = failed[0]
        place = f"prompt_index {p}" + ("" if s is None else f", sample {s}")
        raise RewardError(f"{message}; it was scoring {place}", s, groups) from errors.get(p)
    check_environments(groups)
    return groups


def check_environments(groups: Sequence[Group]) -> None:
    """That one of them did what it is for. A few that fail are counted; where all do, something is broken."""
    every = [sample.trajectory for group in groups for sample in group]
    if every and all(trajectory.failed for trajectory in every):
        raise RolloutError(
            f"all {len(every)} episodes ended in a failure of their environment; the first: {every[0].error}; mend it, or raise "
            "step_timeout",
            groups,
        )
