"""Handwritten digits of 8 x 8 pixels, which scikit-learn ships: 1,797 real pictures, each with the question for its digit.

The last fifth of the rows is for test, and the fifth before it for validation.
"""

import random
from collections.abc import Sequence
from functools import cache

from grpo.data.rows import Made
from grpo.env.messages import Message
from grpo.env.pictures import Picture, picture_from
from grpo.env.types import Example, Split, State
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import enforced
from tasks.shapes import SIDE, asked, guess, said

QUESTION = "Which digit is this?"


@cache
def rows() -> list[Example]:
    """Return all rows in the order of the file. pixels: 64 numbers from 0 to 16, row after row."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(f"task=digits needs scikit-learn ({error}): pip install -e '.[digits]'") from error
    pixels, digits = load_digits(return_X_y=True)
    return [
        {"question": QUESTION, "answer": str(int(digit)), "pixels": [int(value) for value in values]}
        for values, digit in zip(pixels, digits, strict=True)
    ]


def places(split: Split) -> range:
    """Return the rows of a split. Raises UserError if there is no such split."""
    size = len(rows())
    begins = {"train": 0, "validation": size * 3 // 5, "test": size * 4 // 5}
    if split not in begins:
        raise UserError(f"there is no split {split!r}: choose {', '.join(begins)}")
    ends = {"train": begins["validation"], "validation": begins["test"], "test": size}
    return range(begins[split], ends[split])


def drawn(row: Example) -> Picture:
    """Return the picture of a row: its pixels, each a square of equal pixels."""
    from PIL import Image

    small = Image.frombytes("L", (8, 8), bytes(255 * value // 16 for value in row["pixels"]))
    return picture_from(small.resize((SIDE, SIDE), Image.Resampling.NEAREST))


def guesses(count: int, seed: int) -> list[State]:
    """Return digits of train with random answers, which teach a model the form of an answer and nothing of pictures."""
    rng = random.Random(f"guesses {seed}")
    chosen = [rows()[rng.choice(places("train"))] for _ in range(count)]
    return [guess(drawn(row), QUESTION, str(rng.randrange(10))) for row in chosen]


class Digits(RowTask):
    """The digits, graded by the text of the answer."""

    @enforced("task")
    def __init__(self, rewards: Functions = (said,), weights: Weights = None) -> None:
        super().__init__(self, rewards, weights)

    def split(self, split: Split) -> Sequence[Example]:
        chosen = places(split)
        return Made(len(chosen), lambda i: rows()[chosen[i]])

    def messages(self, example: Example) -> tuple[Message, ...]:
        return (asked(drawn(example), example["question"]),)
