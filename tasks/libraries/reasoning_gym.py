"""The generated problems of reasoning-gym, graded by the library: task=reasoning_gym task.dataset=chain_sum."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import reasoning_gym

from grpo.data.rows import Made
from grpo.env.messages import Message
from grpo.env.types import Action, Example, Reward, SingleTurn, Split, State
from grpo.extras.grading.answers import extract_answer
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Whole
from grpo.system.seeds import own_randomness


@dataclass
class Graded(SingleTurn):
    """A question of these rows. The answer is in the last box, the library grades it from 0 to 1, and 1 is right."""

    rows: Any
    row: Example

    def step(self, action: Action) -> Reward:
        with own_randomness():
            value = float(self.rows.score_answer(extract_answer(action.message.content), entry=self.row))
        return Reward(value, value >= 1)


class ReasoningGym(RowTask):
    """dataset: its name in the library. config: its settings. template: surrounds {question}. others: `weights` of the rewards.
    The test questions are the library's first, and no training question is one of them."""

    def __init__(
        self,
        dataset: str = "chain_sum",
        config: Mapping[str, Any] | None = None,
        train_size: Count = 20000,
        test_size: Count = 200,
        seed: Whole = 0,
        template: str = "{question}\nWrite the answer as \\boxed{}.",
        rewards: Functions = ("environment",),
        **others: Any,
    ) -> None:
        super().__init__(self, rewards, **others)
        self.train_size, self.test_size, self.template = train_size, test_size, template
        with own_randomness():
            size = train_size + test_size
            self.rows = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **(config or {}))

    def row(self, place: int) -> Example:
        with own_randomness():
            return {**self.rows[place]}

    @cached_property
    def held_out(self) -> Mapping[str, Example]:
        return {row["question"]: row for row in map(self.row, range(self.test_size))}

    def train_row(self, i: int) -> Example:
        """Return training row i, or the next one that is no question of the test."""
        for place in range(i, i + self.train_size):
            row = self.row(self.test_size + place % self.train_size)
            if row["question"] not in self.held_out:
                return row
        raise UserError("every question is one of the test: lower task.test_size, or make them harder by task.config")

    def split(self, split: Split) -> Sequence[Example]:
        return Made(self.train_size, self.train_row) if split == "train" else list(self.held_out.values())

    def messages(self, example: Example) -> tuple[Message, ...]:
        return (Message("user", self.template.replace("{question}", example["question"])),)

    def build(self, example: Example) -> Graded:
        return Graded(self.messages(example), self.rows, example)


def worked_answers(count: int, seed: int, hasty: float = 0.0, slips: float = 0.0, **config: Any) -> list[State]:
    """Return sums with the library's answers, to warm up a model. hasty, slips: the shares that have another sum's answer."""
    rng = random.Random(seed)
    task = ReasoningGym(config=config, train_size=count, test_size=1, seed=10**6 * (seed + 1))
    rows = list(map(task.row, range(count)))
    pairs = [(row, rng.choice(rows) if rng.random() < hasty + slips else row) for row in rows]
    return [State((*task.messages(a), Message("assistant", f"\\boxed{{{b['answer']}}}"))) for a, b in pairs]
