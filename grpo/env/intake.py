"""Validates what a user's code returns, and converts it to State, Step and Reward."""

from collections.abc import Iterable
from inspect import signature
from itertools import takewhile
from typing import Any

from grpo.env.messages import message_of, shown, tool_of
from grpo.env.types import Env, EnvBuilder, Example, Reward, State
from grpo.system.calls import awaited


def asked_for(function: Any, **offered: Any) -> dict[str, Any]:
    """Return those of the offered arguments that a function names."""
    named = signature(function).parameters
    return {name: value for name, value in offered.items() if name in named}


def no_tokens(ids: Iterable[Any], size: int) -> list[Any]:
    """Return those of the given token ids that a vocabulary of this size does not have."""
    return [i for i in ids if type(i) is not int or not 0 <= i < size]


def build(builder: EnvBuilder, example: Example, seed: int = 0, group_seed: int = 0) -> Env:
    """Build a fresh environment, and pass the seeds for which `build` has a parameter."""
    return builder.build(example, **asked_for(builder.build, seed=seed, group_seed=group_seed))


def close_env(env: Env | None) -> Any:
    """Close an environment, if it can be closed. Returns what its `close` gives, which may be a coroutine."""
    return getattr(env, "close", lambda: None)()


def first_state(builder: EnvBuilder, example: Example) -> State:
    """Return the state with which an environment of the example starts, and close the environment."""
    env = build(builder, example)
    try:
        return state_of(awaited(env.start()))
    finally:
        awaited(close_env(env))


def state_of(state: Any) -> State:
    """Return the result of an environment as a State. Raises TypeError or ValueError if it is none."""
    if not hasattr(state, "messages"):
        raise TypeError(f"the environment gave {shown(state)}, not a state with messages")
    messages = tuple(map(message_of, state.messages))
    if not messages:
        raise ValueError("the environment gave a state without a message")
    more = {name: getattr(state, name) for name in ("prompt", "stop", "max_tokens", "reward") if hasattr(state, name)}
    return State(messages, tuple(map(tool_of, getattr(state, "tools", ()))), **more)


def reward_of(reward: Any) -> Reward:
    """Return a reward in Python's own numbers, which can be written as JSON. Raises an exception if it is
    none."""
    parts = {name: float(value) for name, value in reward.parts.items()}
    more = {name: getattr(reward, name) for name in ("outcome", "advantage", "extra") if hasattr(reward, name)}
    return Reward(float(reward.value), bool(reward.correct), parts, **more)


def next_of(result: Any) -> State | Reward | None:
    """Return what `step` gave: the next state, the reward with which the episode ends, or None if it ends
    without one."""
    if result is None:
        return None
    return reward_of(result) if hasattr(result, "value") else state_of(result)


def observation(state: State) -> str:
    """Return what is new to the policy in a state: the texts since its last message, or the prompt that
    stands for them."""
    if state.prompt is not None:
        return str(state.prompt)
    new = takewhile(lambda message: message.role != "assistant", reversed(state.messages))
    return "\n".join(message.content for message in reversed([*new]))
