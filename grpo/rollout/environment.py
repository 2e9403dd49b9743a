"""One environment of an episode, from its start to its close: every call of it runs in a thread, with a time limit."""

import logging
from collections.abc import Callable
from typing import Any

from grpo.env.intake import build, close_env, next_of, reward_of, state_of
from grpo.env.types import Action, Env, Example, Reward, State, Task
from grpo.system.calls import Calls, awaited
from grpo.system.errors import error_line

log = logging.getLogger(__name__)

Next = State | Reward | None | BaseException  # after a call: a state, the environment's reward, the end, or its failure


class Environment:
    """The environment of the episode at `place`. timeout: seconds of one call."""

    def __init__(self, calls: Calls, place: tuple[int, int], timeout: float) -> None:
        self.calls, self.place, self.timeout = calls, place, timeout
        self.env: Env | None = None
        self.closed = False

    async def start(self, task: Task, example: Example, seed: int, group_seed: int) -> Next:
        """Build and start the environment. group_seed: the one that all samples of the example have."""

        def begin() -> Any:
            self.env = build(task, example, seed, group_seed)
            if self.closed:  # it was built after its time
                return awaited(close_env(self.env))
            return self.env.start()

        return await self._call(begin, state_of)

    async def step(self, action: Action) -> Next:
        """Take an action."""
        return await self._call(self.env.step, next_of, action)

    async def outcome(self) -> Reward | BaseException | None:
        """Return the reward that the environment gives the whole episode, if it has one."""
        method = getattr(self.env, "outcome", None)
        if not method:
            return None
        return await self._call(method, lambda result: None if result is None else reward_of(result))

    async def close(self) -> None:
        """Close the environment, if it can be closed."""
        self.closed = True
        if hasattr(self.env, "close"):
            failed = await self.calls.run(self.place, self.timeout, close_env, self.env)
            if isinstance(failed, BaseException):
                log.warning("an environment could not be closed: %s", error_line(failed))

    async def _call(self, function: Callable[..., Any], read: Callable[[Any], Next], *args: Any) -> Next:
        result = await self.calls.run(self.place, self.timeout, function, *args)
        if isinstance(result, BaseException):
            return result
        try:
            return read(result)
        except Exception as error:
            return error
