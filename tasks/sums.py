"""Sums of two numbers, as a small instruct model meets them: What is 56 - 26? A seed generates them, and nothing is downloaded.

Before its question the model reads worked examples, as turns of the conversation. The last number of its answer counts.
"""

import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Annotated

from grpo.data.dataset import side
from grpo.env.messages import Message
from grpo.env.types import Example, Split
from grpo.rewards.combined import Weights
from grpo.rewards.functions import last_number
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Range, Whole, enforced

WORKED = ((12, "+", 7, 19), (40, "-", 25, 15), (31, "+", 18, 49), (57, "-", 8, 49))
QUESTION = "What is {} {} {}?"
HELD_OUT = {"test": 0.2}  # share of all questions


def asked(left: int, sign: str, right: int) -> Message:
    """Return the question, as the user asks it."""
    return Message("user", QUESTION.format(left, sign, right))


class Sums(RowTask):
    """largest: of the two numbers, the smaller of which is taken from the larger. shots: worked examples before the question."""

    @enforced("task")
    def __init__(
        self,
        largest: Annotated[int, Range(20, 200)] = 60,
        shots: Annotated[int, Range(0, len(WORKED))] = 2,
        train_size: Count = 2000,
        test_size: Count = 200,
        seed: Whole = 0,
        rewards: Functions = (last_number,),
        weights: Weights = None,
        solved: float = 1.0,
    ) -> None:
        self.largest, self.shots, self.seed = largest, shots, seed
        self.sizes = {"train": train_size, "test": test_size}
        super().__init__(self, rewards, weights, solved)

    def split(self, split: Split) -> Sequence[Example]:
        if split not in self.sizes:
            raise UserError(f"there is no split {split!r}: {', '.join(self.sizes)}")
        rows, size = self.questions(split), self.sizes[split]
        if size > len(rows):
            raise UserError(
                f"task.{split}_size={size} is more than the {len(rows)} questions with task.largest={self.largest}"
            )
        return rows[:size]

    def questions(self, split: Split) -> list[Example]:
        """Return all questions of a split, each once. A hash of the question decides the split, so that the splits share none."""
        rows = [
            {"left": left, "sign": sign, "right": right, "answer": left + right if sign == "+" else left - right}
            for left, right in combinations_with_replacement(range(self.largest, 1, -1), 2)
            for sign in "+-"
            if side([left, sign, right], HELD_OUT) == split
        ]
        random.Random(self.seed).shuffle(rows)
        return rows

    def messages(self, example: Example) -> tuple[Message, ...]:
        worked = [
            message
            for left, sign, right, answer in WORKED[: self.shots]
            for message in (asked(left, sign, right), Message("assistant", f"{left} {sign} {right} = {answer}"))
        ]
        return (*worked, asked(example["left"], example["sign"], example["right"]))
