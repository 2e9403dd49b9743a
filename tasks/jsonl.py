"""Any file or dataset with a column of prompts, and any reward: a task that needs no code."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import getmembers, isawaitable, isfunction
from typing import Any

from grpo.data.dataset import Dataset
from grpo.env.messages import Message
from grpo.env.tools import ToolEnv
from grpo.env.types import Env, Example, Reward, Split, State
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions, imported
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import FunctionName

log = logging.getLogger(__name__)


class Jsonl(RowTask):
    """prompt: the column with the prompt, a text or a list of messages ({role, content}; the policy continues a list that
    ends with the assistant). gold: the column with the right answer, for rewards that need `gold`. template: surrounds a text,
    which replaces {prompt}. system: the message before it. environment: see `FactoryEnv`. rows: further arguments of `Dataset`.
    """

    def __init__(
        self,
        path: str,
        rewards: Functions,
        weights: Weights = None,
        solved: float = 1.0,
        prompt: str = "prompt",
        gold: str | None = None,
        template: str = "{prompt}",
        system: str | None = None,
        environment: FunctionName | None = None,
        **rows: Any,
    ) -> None:
        if "{prompt}" not in template:
            raise UserError(f"task.template={template!r} must say {{prompt}} where the prompt goes")
        self.environment = imported(environment, "task.environment") if isinstance(environment, str) else environment
        self.prompt, self.gold_column, self.template, self.system = prompt, gold, template, system
        self.said = False  # whether the log has a line about prompts that are texts
        columns = (prompt,) if gold is None else (prompt, gold)
        super().__init__(Dataset(path, columns, **rows), rewards, weights, solved)

    def columns(self, example: Example) -> Example:
        """Return the columns, with the prompt also as `prompt`, which shows whether this is a conversation."""
        return super().columns({**example, "prompt": example.get(self.prompt)})

    def examples(self, split: Split) -> Sequence[Example]:
        rows = super().examples(split)
        if split == "train" and not self.said and isinstance(rows[0].get(self.prompt), str):
            self.said = True
            line = "a user's message, in the chat template if there is one; model.chat_template=none sends it alone, as TRL"
            log.info("task.prompt=%s is a text: %s", self.prompt, line)
        return rows

    @property
    def several_turns(self) -> bool:
        return self.environment is not None

    def build(self, example: Example) -> Env:
        if self.environment is None:
            return super().build(example)
        return FactoryEnv(self.messages(example), self.environment(), example, self.rewards.solved)

    def messages(self, example: Example) -> tuple[Message, ...]:
        prompt = example[self.prompt]
        before = (Message("system", self.system),) if self.system else ()
        if isinstance(prompt, str):
            return (*before, Message("user", self.template.replace("{prompt}", prompt)))
        try:
            return (*before, *(Message(message["role"], message["content"]) for message in prompt))
        except (TypeError, KeyError) as error:
            needed = "neither a text nor a list of messages with role and content"
            raise UserError(f"task.prompt={self.prompt}: {str(prompt)[:80]!r} is {needed}") from error


class FactoryEnv(ToolEnv):
    """An environment in the form of TRL's `environment_factory`: its public methods are the tools, a text that `reset(**row)`
    returns is added to the prompt, and `get_reward()`, if there is one, gives the reward named `environment`. Whatever else is
    read from it, as by reward functions that get `environments`, is the inner one's."""

    def __init__(self, messages: Sequence[Message], inner: Any, row: Mapping[str, Any], solved: float) -> None:
        names = {name for name, _ in getmembers(type(inner), isfunction) if name[0] != "_"}
        tools = sorted(names - {"reset", "get_reward", "close"})
        super().__init__(messages, [getattr(inner, name) for name in tools])
        self.inner, self.row, self.solved = inner, row, solved

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name) if "inner" in self.__dict__ else super().__getattribute__(name)

    def start(self) -> State:
        if (more := self.inner.reset(**self.row)) is not None:
            *before, last = self.messages
            self.messages = (*before, replace(last, content=last.content + more))
        return super().start()

    async def outcome(self) -> Reward | None:
        given = self.inner.get_reward() if hasattr(self.inner, "get_reward") else None
        value = await given if isawaitable(given) else given
        return None if value is None else Reward(float(value), value >= self.solved)
