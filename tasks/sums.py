"""Sums of two numbers, as a small instruct model meets them: What is 56 - 26? A seed generates them, and nothing is downloaded.

Before its question the model reads worked examples, as turns of the conversation. The last number of its answer counts. In
`CalledSums` there are products, too, and a calculator to call, as the worked examples do.
"""

import operator
import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Annotated

from grpo.data.rows import side
from grpo.env.messages import Message
from grpo.env.types import Example, Split, Trajectory
from grpo.extras.grading.functions import last_number
from grpo.extras.tools.env import ToolEnv
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Range, Whole, enforced
from tasks.calculator import calculator, called, in_time

RESULT = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WORKED = ((12, "+", 7), (40, "-", 25), (31, "+", 18), (57, "-", 8))
CALLED = ((12, "*", 17), (340, "+", 255), (91, "-", 48), (25, "*", 30))
QUESTION = "What is {} {} {}?"
HELD_OUT = {"test": 0.2}  # share of all questions


def question(left: int, sign: str, right: int) -> Message:
    """Return the question, as the user asks it."""
    return Message("user", QUESTION.format(left, sign, right))


def right_answer(left: int, sign: str, right: int) -> Message:
    """Return the right answer, as the model should write it."""
    return Message("assistant", f"{left} {sign} {right} = {RESULT[sign](left, right)}")


class Sums(RowTask):
    """largest: the limit of both numbers. A difference takes the smaller from the larger. shots: worked examples before the
    question."""

    signs, shown = "+-", WORKED

    @enforced("task")
    def __init__(
        self,
        largest: Annotated[int, Range(20, 200)] = 60,
        shots: Annotated[int, Range(0, 4)] = 2,
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
            limit = f"the {len(rows)} questions with task.largest={self.largest}"
            raise UserError(f"task.{split}_size={size} is more than {limit}")
        return rows[:size]

    def questions(self, split: Split) -> list[Example]:
        """Return all questions of a split, each once. A hash of the question decides the split, so that the splits share none."""
        rows = [
            {"left": left, "sign": sign, "right": right, "answer": RESULT[sign](left, right)}
            for left, right in combinations_with_replacement(range(self.largest, 1, -1), 2)
            for sign in self.signs
            if side([left, sign, right], HELD_OUT) == split
        ]
        random.Random(self.seed).shuffle(rows)
        return rows

    def messages(self, example: Example) -> tuple[Message, ...]:
        worked = [message for numbers in self.shown[: self.shots] for message in self.worked(*numbers)]
        return (*worked, question(example["left"], example["sign"], example["right"]))

    def worked(self, left: int, sign: str, right: int) -> tuple[Message, ...]:
        """Return a question and its answer."""
        return question(left, sign, right), right_answer(left, sign, right)


class CalledSums(Sums):
    """Sums, differences and products, with a calculator. An episode that runs out of turns has no answer."""

    signs, shown = "+-*", CALLED

    def worked(self, left: int, sign: str, right: int) -> tuple[Message, ...]:
        call = called(f"{left} {sign} {right}")
        return question(left, sign, right), *call, right_answer(left, sign, right)

    def build(self, example: Example) -> ToolEnv:
        return ToolEnv(self.messages(example), [calculator])

    def graded_part(self, trajectory: Trajectory) -> Trajectory:
        return in_time(trajectory)
