"""GSM8K: grade-school word problems with a number for an answer (arXiv 2110.14168)."""

import re
from types import MappingProxyType
from typing import Any

from grpo.env.messages import Message
from grpo.env.types import Example
from grpo.extras.datasets.dataset import Dataset
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import AS_TEXT, NEXT_QUESTION, RowTask, chosen, templates

PROMPTS = templates(
    "Reason step by step, and put the final answer in \\boxed{}.",
    "A baker makes 3 trays of 12 rolls and sells 20 of them. How many rolls are left?",
    "3 trays of 12 rolls are 3 * 12 = 36 rolls. After 20 are sold, 36 - 20 = 16 are left. The answer is \\boxed{16}.",
)


class GSM8K(RowTask):
    """path: a hub id, a file, or a folder with train.jsonl and test.jsonl; rows have `question`, and an `answer` that ends in
    `#### 18`. rows: further arguments of `Dataset`."""

    usual_weights = MappingProxyType({"format": 0.1})

    def __init__(
        self,
        path: str = "openai/gsm8k",
        prompt: str = "one_shot",
        rewards: Functions = ("correct", "format"),
        weights: Weights = None,
        solved: float = 1.0,
        config: str | None = "main",
        **rows: Any,
    ) -> None:
        self.stop = NEXT_QUESTION if prompt in AS_TEXT else None
        self.template = chosen(PROMPTS, prompt)
        data = Dataset(path, ("question", "answer"), "gsm8k", config, form=self.template, **rows)
        super().__init__(data, rewards, weights, solved)

    def messages(self, example: Example) -> tuple[Message, ...]:
        return self.template(example["question"])

    def demonstration(self, example: Example) -> Any:
        """Return the column's answer; without a column the worked answer, in the form that the prompt asks for."""
        if self.data.demonstration_column or "####" not in str(example.get("answer")):
            return super().demonstration(example)
        worked = re.sub("<<.*?>>", "", example["answer"].rpartition("####")[0]).strip()
        return f"{' ' if self.stop else ''}{worked}\nThe answer is \\boxed{{{self.gold(example)}}}."

    def gold(self, example: Example) -> str | None:
        answer = example.get("answer")
        return None if answer is None else str(answer).rpartition("####")[2].strip()
