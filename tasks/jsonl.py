"""Any file or dataset with a column of prompts, and any reward: the task without code."""

from collections.abc import Sequence
from typing import Any

from grpo.data.dataset import Dataset
from grpo.env.messages import Message
from grpo.env.types import Example
from grpo.rewards.resolve import Function
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError


class Jsonl(RowTask):
    """prompt: the column with the prompt, a text or a list of messages ({role, content}; one that ends with the assistant is
    continued). gold: the column with the right answer, for rewards that ask for `gold`. template: put round a text, with
    {prompt} where it goes; system: said before it. rows: further arguments of `Dataset`.
    """

    def __init__(
        self,
        path: str,
        rewards: str | Sequence[str | Function],
        weights: Sequence[float] | None = None,
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
        """The column goes by the name `prompt` too: it says whether this is a conversation."""
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
