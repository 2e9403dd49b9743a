"""Any file or dataset with a column of prompts, and any reward: a task that needs no code."""

from typing import Any

from grpo.data.dataset import Dataset
from grpo.env.messages import Message
from grpo.env.types import Example
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError


class Jsonl(RowTask):
    """prompt: the column with the prompt, a text or a list of messages ({role, content}; the policy continues a list that
    ends with the assistant). gold: the column with the right answer, for rewards that need `gold`. template: surrounds a text,
    which replaces {prompt}. system: the message before it. rows: further arguments of `Dataset`.
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
        **rows: Any,
    ) -> None:
        if "{prompt}" not in template:
            raise UserError(f"task.template={template!r} must say {{prompt}} where the prompt goes")
        self.prompt, self.gold_column, self.template, self.system = prompt, gold, template, system
        columns = (prompt,) if gold is None else (prompt, gold)
        super().__init__(Dataset(path, columns, **rows), rewards, weights, solved)

    def columns(self, example: Example) -> Example:
        """Return the columns, with the prompt also as `prompt`, which shows whether this is a conversation."""
        return super().columns({**example, "prompt": example.get(self.prompt)})

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
