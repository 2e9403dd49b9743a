"""Sums of two numbers, as a small instruct model meets them: What is 56 - 26? A seed generates them, and nothing is downloaded.

Before its question the model reads worked examples, as turns of the conversation. The last number of its answer counts.
"""

import random
from collections.abc import Sequence
from typing import Annotated

from grpo.data.dataset import Made, side
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
        largest: Annotated[int, Range(20, 10**6)] = 60,
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
        return Made(self.sizes[split], lambda i: self.row(split, i))

    def row(self, split: Split, place: int) -> Example:
        """Return row `place` of a split. A hash of the question decides the split, so that the splits share none."""
        rng = random.Random(f"{split} {self.seed} {place}")
        while True:
            right, left = sorted(rng.randint(2, self.largest) for _ in range(2))
            sign = rng.choice("+-")
            if side([left, sign, right], HELD_OUT) == split:
                return {
                    "left": left,
                    "sign": sign,
                    "right": right,
                    "answer": left + right if sign == "+" else left - right,
                }

    def messages(self, example: Example) -> tuple[Message, ...]:
        worked = [
            message
            for left, sign, right, answer in WORKED[: self.shots]
            for message in (asked(left, sign, right), Message("assistant", f"{left} {sign} {right} = {answer}"))
        ]
        return (*worked, asked(example["left"], example["sign"], example["right"]))
