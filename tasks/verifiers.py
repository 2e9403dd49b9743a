"""Single-turn tasksets of verifiers 0.4, with their @vf.reward functions: task=verifiers task.taskset=FILE.py:Taskset."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.env.messages import Message, message_of
from grpo.env.types import Example, Reward, SingleTurn, Split, Trajectory
from grpo.rewards.resolve import imported
from grpo.system.ranges import Count


class Verifiers:
    """taskset: FILE.py:CLASS, a dotted path, or the id of an installed one. config: its settings. test_size: how many of its
    first tasks are for evaluation. solved: the reward from which an answer is right."""

    def __init__(
        self, taskset: str, config: Mapping[str, Any] | None = None, test_size: Count = 200, solved: float = 1.0
    ) -> None:
        from verifiers.v1 import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class

        kind = imported(taskset, "the taskset") if "." in taskset else taskset_class(taskset)
        settings = (concrete_type(kind, TasksetConfig) or TasksetConfig)(**(config or {}))
        self.tasks, self.test_size, self.solved = list(kind(settings)), test_size, solved

    def examples(self, split: Split) -> Sequence[Example]:
        tasks = self.tasks[self.test_size :] if split == "train" else self.tasks[: self.test_size]
        return [task.data.model_dump(mode="json") for task in tasks]

    def build(self, example: Example) -> SingleTurn:
        system, prompt = example["system_prompt"], example["prompt"]
        before = (Message("system", system),) if system else ()
        question = (Message("user", prompt),) if isinstance(prompt, str) else tuple(map(message_of, prompt))
        return SingleTurn((*before, *question))

    async def score(self, example: Example, trajectory: Trajectory) -> Reward:
        from verifiers import v1 as vf
        from verifiers.v1.trace import AgentInfo, TraceTask

        task = self.tasks[example["idx"]]
        answer = vf.MessageNode(message=vf.AssistantMessage(content=trajectory.answer), sampled=True)
        task_info = TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace(task=task_info, agent=AgentInfo(config=vf.AgentConfig()), nodes=[answer])
        await task.score(trace)
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward} | trace.metrics
        return Reward(trace.reward, trace.reward >= self.solved, parts)
