"""Tasksets of verifiers 0.4, with their @vf.reward functions: task=verifiers task.taskset=FILE.py:Taskset.

One turn, which this project samples, or with `agent` an agent of the library, which plays several turns with tools.
"""

import asyncio
import atexit
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from grpo.env.messages import Message, message_of
from grpo.env.types import Env, Example, Reward, SingleTurn, Split, Trajectory
from grpo.extras.serve.sessions import sessions
from grpo.rewards.resolve import imported
from grpo.system.errors import UserError, error_line
from grpo.system.ranges import Count
from tasks.agent import AgentEnv

USUAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # of an agent
GRACE = 10.0  # seconds for the library's servers to end


class Verifiers:
    """taskset: FILE.py:CLASS, a dotted path, or the id of an installed one. config: its settings. test_size: how many of its
    first tasks are for evaluation. solved: the reward from which an answer is right. agent: the fields of `vf.AgentConfig`, such
    as {max_turns: 6}; None: the answer is one message."""

    words = ("verifiers",)  # as of a program

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        test_size: Count = 200,
        solved: float = 1.0,
        agent: Mapping[str, Any] | None = None,
    ) -> None:
        from verifiers.v1 import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class

        kind = imported(taskset, "the taskset") if "." in taskset else taskset_class(taskset)
        settings = (concrete_type(kind, TasksetConfig) or TasksetConfig)(**(config or {}))
        self.tasks, self.test_size, self.solved = list(kind(settings)), test_size, solved
        self.world = None
        if agent is not None:
            name = kind.__module__ if "." in taskset else taskset
            self.world = World({"id": name, **(config or {})}, USUAL | dict(agent))
            self.server, self.looks = sessions(), 2  # looks: examples that are started to measure their prompts

    def examples(self, split: Split) -> Sequence[Example]:
        tasks = self.tasks[self.test_size :] if split == "train" else self.tasks[: self.test_size]
        return [task.data.model_dump(mode="json") for task in tasks]

    def build(self, example: Example) -> Env:
        if self.world:
            return Episode(self, example, 0, self.solved)
        system, prompt = example["system_prompt"], example["prompt"]
        before = (Message("system", system),) if system else ()
        question = (Message("user", prompt),) if isinstance(prompt, str) else tuple(map(message_of, prompt))
        return SingleTurn((*before, *question))

    async def score(self, example: Example, trajectory: Trajectory) -> Reward:
        if self.world:  # an episode that met a limit of turns has none of its own
            return trajectory.reward or Reward(0.0, False)
        from verifiers import v1 as vf
        from verifiers.v1.trace import AgentInfo, TraceTask

        task = self.tasks[example["idx"]]
        answer = vf.MessageNode(message=vf.AssistantMessage(content=trajectory.answer), sampled=True)
        task_info = TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace(task=task_info, agent=AgentInfo(config=vf.AgentConfig()), nodes=[answer])
        await task.score(trace)
        return self.reward(trace)

    def reward(self, trace: Any) -> Reward:
        """Return the reward of a trace that the library has scored."""
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward} | trace.metrics
        return Reward(trace.reward, trace.reward >= self.solved, parts)


class World:
    """The library's environment, which serves its tools from the first episode to the end of this process, on a loop of its own.

    taskset, agent: the fields of their configurations. Raises UserError for what the library refuses.
    """

    def __init__(self, taskset: Mapping[str, Any], agent: Mapping[str, Any]) -> None:
        from verifiers import v1 as vf

        try:
            self.env = vf.load_environment(vf.SingleAgentEnvConfig(taskset=dict(taskset), agent=dict(agent)))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"verifiers refuses task.agent or task.taskset: {error_line(error)}") from error
        self.loop, self.lock, self.serving = asyncio.new_event_loop(), threading.Lock(), None

    def played(self, task: Any, address: str) -> Future:
        """Start an episode, and return the Future of its trace. address: the session that answers the calls of the model."""
        with self.lock:
            if self.serving is None:
                threading.Thread(target=self.loop.run_forever, name="verifiers", daemon=True).start()
                self.over, self.ready = asyncio.Event(), asyncio.Event()
                self.serving = asyncio.run_coroutine_threadsafe(self.serve(), self.loop)
                # the library needs threads to end its servers, and there are none any more in atexit's own functions
                getattr(threading, "_register_atexit", atexit.register)(self.stop)
        return asyncio.run_coroutine_threadsafe(self.play(task, address), self.loop)

    async def serve(self) -> None:
        """Hold what the library serves, from start to end."""
        async with self.env.serving():
            self.ready.set()
            await self.over.wait()

    async def play(self, task: Any, address: str) -> Any:
        from verifiers import v1 as vf

        served = asyncio.wrap_future(self.serving)
        await asyncio.wait([asyncio.ensure_future(self.ready.wait()), served], return_when=asyncio.FIRST_COMPLETED)
        if served.done():
            await served  # raises why it did not start
        context = vf.ModelContext("policy", vf.EvalClientConfig(base_url=address))
        episode = await self.env.run_episode(task, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(errors[-1].message if errors else "the episode was not completed")
        return episode.traces[-1]

    def stop(self) -> None:
        """End the library's servers."""
        self.loop.call_soon_threadsafe(self.over.set)
        with suppress(Exception):
            self.serving.result(GRACE)


class Episode(AgentEnv):
    """An episode that an agent of the library plays. It calls the policy over HTTP, as a program does."""

    def begin(self, addresses: dict[str, str]) -> None:
        task = self.task.tasks[self.example["idx"]]
        self.trace = self.task.world.played(task, addresses["OPENAI_BASE_URL"])
        self.trace.add_done_callback(self.took)

    def took(self, trace: Future) -> None:
        """Take the reward of an episode that is over, or its error."""
        self.error = None if trace.cancelled() else trace.exception()
        if not trace.cancelled() and self.error is None:
            self.reward = self.task.reward(trace.result())
        self.end(int(self.reward is None))

    def last_line(self) -> str:
        return "it was cancelled" if self.error is None else error_line(self.error)

    def close(self) -> None:
        super().close()
        self.trace.cancel()
