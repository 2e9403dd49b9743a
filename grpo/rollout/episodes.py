"""Plays episodes in parallel and scores them. `episode` plays one of them, from its first state to its end.

Every episode is a coroutine; one event loop, in its own thread, runs them all. Environments and rewards run in other threads
(system/calls.py). The engine stays in the thread that called `play` (engine_queue.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from grpo.engines.protocol import Engine, Sampling
from grpo.env.rendering import Renderer, message_read, rendered_prompt
from grpo.env.tokens import Turn
from grpo.env.types import Action, End, Example, Reward, State, Step, Task, Trajectory
from grpo.rollout.engine_queue import EngineQueue
from grpo.rollout.environment import Environment
from grpo.rollout.rewarding import UNKNOWN, Scorer
from grpo.rollout.types import Group, Limits, Sample
from grpo.system import distributed
from grpo.system.calls import Calls
from grpo.system.errors import RewardError, RolloutError, UserError, error_line
from grpo.system.stopping.stop import together
from grpo.system.threads import beside

THREADS = 64  # threads for environments
ENVIRONMENT = 1 << 31  # used instead of the turn for the seed of the environment itself

Episode = tuple[Trajectory, tuple[Turn, ...]]  # an episode as messages and as tokens


class Play(Protocol):
    """The slot `play`: plays `group_size` episodes of each example and scores them. `play` below is the default."""

    def __call__(
        self,
        task: Task,
        examples: Sequence[Example],
        group_size: int,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        seed: Callable[..., int],
        limits: Limits,
    ) -> list[Group]: ...


async def episode(
    engine: EngineQueue,
    env: Environment,
    task: Task,
    example: Example,
    renderer: Renderer,
    max_turns: int,
    seed: Callable[..., int],
) -> Episode:
    """Play one episode: start the environment, then prompt, completion and step in turn, until it ends.

    seed: from (index of the sample, turn) to a seed.
    """
    steps: list[Step] = []
    turns: list[Turn] = []
    _, s = env.place

    async def ended(end: End, last: State | None = None) -> Episode:
        reward = state if isinstance(state, Reward) else await env.outcome()
        if isinstance(reward, BaseException):
            return failed(reward)
        return Trajectory(tuple(steps), end, last, reward=reward), tuple(turns)

    def failed(error: BaseException, last: State | None = None) -> Episode:
        end = "env_timeout" if isinstance(error, TimeoutError) else "env_error"
        return Trajectory(tuple(steps), end, last, error_line(error)), tuple(turns)

    cut_short = False
    state = await env.start(task, example, seed(s, ENVIRONMENT), seed(ENVIRONMENT, ENVIRONMENT))
    while isinstance(state, State):
        if len(steps) >= max_turns:
            return await ended("truncated" if cut_short else "out_of_turns", state)
        own_prompts = not turns and getattr(env.env, "own_prompts", False)
        try:
            prompt = rendered_prompt(renderer, state, steps, turns)
            if own_prompts:
                engine.check(prompt)
        except UserError as error:
            if not turns and not own_prompts:  # every other episode would fail in the same way
                raise
            return failed(error, state)
        if turns and len(prompt) > engine.longest_prompt:  # the conversation no longer fits the model's context
            return await ended("truncated", state)
        completion = await engine.sample(env.place, prompt, seed(s, len(turns)), engine.sampling_in(state, renderer))
        cut_short, message = completion.finish == "length", message_read(renderer, completion.ids, state, prompt)
        action = Action(message, cut_short, completion.ids, completion.logprobs, prompt)
        steps.append(Step(state, action))
        turns.append(Turn(prompt, completion))
        state = await env.step(action)
    if isinstance(state, BaseException):
        return failed(state)
    return await ended("truncated" if cut_short else "answered")


def play(
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    seed: Callable[[int, int, int], int],
    limits: Limits | None = None,
    finished: Callable[[int, Group], None] = lambda p, group: None,
) -> list[Group]:
    """Play `group_size` episodes of every example, and score each group as soon as its last episode is over. If the task or a
    reward has a state, groups are scored in order, one call at a time, so that a call always finds the same state.

    seed: from (index of the example, index of the sample, turn) to the seed of a completion; the turn ENVIRONMENT gives the
    environment's seed. finished: called with each group, and the index of its example, as soon as it is scored. Every rank plays
    its share of the examples. Returns a group for every example, in order, on every rank.
    Raises RolloutError, with the groups that are finished, if a reward or every environment fails.
    """
    limits = limits or Limits()
    mine = distributed.share(len(examples))
    environments = Calls(THREADS, f"an environment of {type(task).__name__}")
    in_order = bool(getattr(task, "state_dict", dict)())
    score = Scorer(task, limits.score_timeout, threads=1 if in_order else None)
    scored = {p: asyncio.Event() for p in mine}
    queue = EngineQueue(engine, sampling, environments, [(p, s) for p in mine for s in range(group_size)])
    errors: dict[int, RewardError] = {}

    async def one(p: int, env: Environment) -> Episode:
        try:
            return await episode(queue, env, task, examples[p], renderer, limits.max_turns, partial(seed, p))
        finally:
            queue.over(env.place)

    async def group(p: int) -> Group:
        envs = [Environment(environments, (p, s), limits.step_timeout) for s in range(group_size)]
        try:
            played = await asyncio.gather(*(one(p, env) for env in envs))
            whole = [s for s, (trajectory, _) in enumerate(played) if not trajectory.failed]
            if in_order:
                await asyncio.gather(*(scored[before].wait() for before in mine if before < p))
            values, error = await score(examples[p], [played[s][0] for s in whole], [envs[s].env for s in whole])
        finally:
            scored[p].set()
            await asyncio.gather(*(env.close() for env in envs))
        if error is not None:
            error.sample = None if error.sample is None else whole[error.sample]
            errors[p] = error
        rewards = dict(zip(whole, values, strict=True))
        samples = [Sample(examples[p], *both, rewards.get(s, UNKNOWN)) for s, both in enumerate(played)]
        if error is None:
            finished(p, samples)
        return samples

    async def all_groups() -> list[Group]:
        return await asyncio.gather(*map(group, mine))

    try:
        groups = together(partial(beside, all_groups, queue.serve))
    finally:
        environments.close()
        score.calls.close()
    failed = distributed.all_gather([(p, str(error), error.sample) for p, error in errors.items()])
    if failed:
        p, message, s = failed[0]
        place = f"prompt_index {p}" + ("" if s is None else f", sample {s}")
        raise RewardError(f"{message}; this was while scoring {place}", s, groups) from errors.get(p)
    trajectories = [sample.trajectory for group in groups for sample in group]
    if trajectories and all(trajectory.failed for trajectory in trajectories):
        ended = f"the environment failed in all {len(trajectories)} episodes"
        raise RolloutError(f"{ended}; the first: {trajectories[0].error}; fix it, or raise step_timeout", groups)
    return groups
