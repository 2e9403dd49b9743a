"""Episodes played side by side and scored. `episode` is one of them, from its first state to its end.

Every episode is a coroutine; one event loop, in a thread of its own, runs them all. Environments and rewards work in threads
(system/calls). The engine stays in the thread that called `play`, and samples all prompts that wait, again and again.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from grpo.engines.protocol import Engine, Sampling
from grpo.env.messages import message_of
from grpo.env.renderer import Renderer
from grpo.env.tokens import Completion, CompletionLike, Turn, completion_of
from grpo.env.types import Action, End, Env, Example, State, Step, Task, Trajectory, build, state_of
from grpo.rollout.rewarding import UNKNOWN, Scorer
from grpo.rollout.types import Group, Limits, Sample
from grpo.system import distributed
from grpo.system.calls import LOOK, PATIENCE, Calls, loop_threads
from grpo.system.errors import RewardError, RolloutError, UserError, told

THREADS = 64  # of environments
ENVIRONMENT = 1 << 31  # in the place of the turn: the seed of the environment itself

T = TypeVar("T")
Place = tuple[int, int]  # of an episode: index of the example, index of the sample
Episode = tuple[Trajectory, tuple[Turn, ...]]  # in both views: messages, and tokens


async def episode(
    policy: "Policy",
    task: Task,
    example: Example,
    renderer: Renderer,
    limits: Limits,
    place: Place,
    seed: Callable[[int], int],
) -> Episode:
    """One environment, from its first state to its end."""
    steps: list[Step] = []
    turns: list[Turn] = []
    env: Env

    def begin() -> Any:
        nonlocal env
        env = build(task, example, seed(ENVIRONMENT))
        return env.start()

    async def environment(function: Callable[..., Any], *args: Any) -> State | BaseException | None:
        """The next state; None where the episode is over; the exception where the environment failed."""
        given = await policy.environments(place, limits.step_timeout, function, *args)
        if isinstance(given, BaseException) or (given is None and steps):
            return given
        try:
            return state_of(given)
        except Exception as error:
            return error

    def ended(end: End, last: State | None = None, error: str | None = None) -> Episode:
        return Trajectory(tuple(steps), end, last, error), tuple(turns)

    cut_short = False
    state = await environment(begin)
    while isinstance(state, State):
        if len(steps) >= limits.max_turns:
            return ended("truncated" if cut_short else "out_of_turns", state)
        try:
            prompt = tuple(renderer.prompt_ids(state.messages, state.tools, turns[-1].ids if turns else ()))
        except UserError as error:
            if not turns:  # every other episode would fail alike
                raise
            return ended("env_error", state, str(error))
        if turns and len(prompt) > policy.room:  # the conversation has outgrown the model
            return ended("truncated", state)
        completion = await policy.say(place, prompt, seed(len(turns)))
        cut_short = completion.finish == "length"
        action = Action(message_of(renderer.parse(completion.ids, state.tools)), cut_short, len(completion.ids))
        steps.append(Step(state, action))
        turns.append(Turn(prompt, completion))
        state = await environment(env.step, action)
    if state is None:
        return ended("truncated" if cut_short else "answered")
    return ended("env_timeout" if isinstance(state, TimeoutError) else "env_error", error=told(state))


class Policy:
    """The engine as episodes see it: `say` gives the completion of one prompt, `serve` samples all that wait, together. It waits
    for every episode whose environment is at work, unless that is slow (see Calls.slow): so batches of quick environments, and
    the last bits of every number with them, do not depend on threads."""

    def __init__(self, engine: Engine, sampling: Sampling, environments: Calls, places: Sequence[Place]) -> None:
        self.engine, self.sampling, self.environments = engine, sampling, environments
        self.room = math.inf if engine.context is None else engine.context - sampling.max_tokens  # tokens of a prompt
        self.asked: dict[Place, tuple[tuple[int, ...], int, asyncio.Future]] = {}
        self.working = set(places)  # episodes whose environment is at work
        self.slow: set[Place] = set()  # those of them that the engine does not wait for
        self.came = (0.0, 0.0)  # when the first and the latest of `asked` came
        self.changed = threading.Condition()

    async def say(self, place: Place, prompt: tuple[int, ...], seed: int) -> Completion:
        future = asyncio.get_running_loop().create_future()
        with self.changed:
            now = time.monotonic()
            self.came = (self.came[0] if self.asked else now, now)
            self.asked[place] = (prompt, seed, future)
            self._rests(place)
        return await future

    def over(self, place: Place) -> None:
        with self.changed:
            self.asked.pop(place, None)  # where its loop has failed
            self._rests(place)

    def _rests(self, place: Place) -> None:
        self.working.discard(place)
        self.slow.discard(place)
        if self.working <= self.slow:  # nobody is waited for
            self.changed.notify()

    def serve(self, episodes: threading.Thread) -> None:
        """Sample for the episodes until all of them are over."""
        while self._wait(episodes):
            with self.changed:
                places = sorted(self.asked)  # not in the order of threads
                asked = [self.asked.pop(place) for place in places]
            prompts, seeds, futures = zip(*asked, strict=True)
            waiting = dict(enumerate(zip(places, futures, strict=True)))
            give = partial(self._give, waiting)
            completions = self.engine.sample(prompts, self.sampling, seeds, give)
            for i, completion in zip(range(len(places)), completions, strict=True):
                if i in waiting:  # an engine need not tell of each as it comes
                    give(i, completion)

    def _give(self, waiting: dict[int, tuple[Place, asyncio.Future]], i: int, completion: CompletionLike) -> None:
        place, future = waiting.pop(i)
        with self.changed:
            self.working.add(place)
        answer = completion_of(completion)
        with suppress(RuntimeError):  # the episodes have ended
            future.get_loop().call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

    def _wait(self, episodes: threading.Thread) -> bool:
        """Until there is something to sample and nothing quick to wait for; False when all episodes are over."""
        with self.changed:
            while (self.asked or self.working) and episodes.is_alive():
                quick = self.working - self.slow
                if self.asked and not quick:
                    first, latest = self.came
                    # slow ones that answer in a row share a batch
                    if not self.slow or time.monotonic() > min(first + PATIENCE, latest + LOOK):
                        return True
                came = self.changed.wait(LOOK if self.asked else 1.0)
                if self.asked and quick and not came:
                    self.slow |= self.environments.slow(quick & self.working, [episodes.native_id, *loop_threads()])
            return False


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
    """Play `group_size` episodes of every example, and score each group as soon as its last episode is over.

    seed: (index of the example, index of the sample, turn) to the seed of a completion; turn ENVIRONMENT is for the environment.
    Every rank plays its share of the examples, and returns a group for every example, both in order. Raises RolloutError, with
    the groups as far as they got, if a reward fails, or every environment.
    """
    limits = limits or Limits()
    mine = distributed.share(len(examples))
    environments, score = Calls(THREADS), Scorer(task, limits.score_timeout)
    policy = Policy(engine, sampling, environments, [(p, s) for p in mine for s in range(group_size)])
    errors: dict[int, RewardError] = {}

    async def one(p: int, s: int) -> Episode:
        try:
            return await episode(policy, task, examples[p], renderer, limits, (p, s), partial(seed, p, s))
        finally:
            policy.over((p, s))

    async def group(p: int) -> Group:
        played = await asyncio.gather(*(one(p, s) for s in range(group_size)))
        known = [s for s, (trajectory, _) in enumerate(played) if not trajectory.failed]
        given, error = await score(examples[p], [played[s][0] for s in known])
        if error is not None:
            error.sample = None if error.sample is None else known[error.sample]
            errors[p] = error
        rewards = dict(zip(known, given, strict=True))
        return [Sample(examples[p], *both, rewards.get(s, UNKNOWN)) for s, both in enumerate(played)]

    async def all_groups() -> list[Group]:
        return await asyncio.gather(*map(group, mine))

    try:
        groups = distributed.all_gather(beside(all_groups, policy.serve))
    finally:
        environments.close()
        score.calls.close()
    failed = distributed.all_gather([(p, str(error), error.sample) for p, error in errors.items()])
    if failed:
        p, message, s = failed[0]
        place = f"prompt_index {p}" + ("" if s is None else f", sample {s}")
        raise RewardError(f"{message}; it was scoring {place}", s, groups) from errors.get(p)
    trajectories = [sample.trajectory for group in groups for sample in group]
    if trajectories and all(trajectory.failed for trajectory in trajectories):
        ended = f"all {len(trajectories)} episodes ended in a failure of their environment"
        raise RolloutError(f"{ended}; the first: {trajectories[0].error}; mend it, or raise step_timeout", groups)
    return groups


def beside(work: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[threading.Thread], None]) -> T:
    """The coroutine in a thread of its own, and `serve` in this one: autocast and CUDA's streams belong to a thread."""
    loop, result = asyncio.new_event_loop(), Future[T]()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result.set_result(runner.run(work()))
        except BaseException as error:
            result.set_exception(error)

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    thread = threading.Thread(target=run, name="episodes", daemon=True)
    thread.start()
    try:
        serve(thread)
    except BaseException:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(cancel)
        raise
    return result.result()
