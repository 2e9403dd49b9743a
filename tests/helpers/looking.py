"""A task with a picture in each row, for runs that take seconds."""

from functools import cache

from grpo.env.messages import Message
from grpo.env.pictures import MARK, Picture
from grpo.env.types import Example, Reward, SingleTurn, Trajectory
from helpers.seeing import drawn

SIZES = ((28, 28), (56, 28), (40, 64))


class Looking:
    """Questions with pictures of noise, of several sizes. The reward differs between samples of a random model. count: of
    pictures in a row; side: pixels of square ones, None for SIZES; rows: to learn from."""

    def __init__(self, count: int = 1, side: int | None = None, rows: int = 100) -> None:
        self.count, self.side, self.rows = count, side, rows

    def examples(self, split: str) -> list[Example]:
        numbers = range(self.rows) if split == "train" else range(self.rows, self.rows + 8)
        return [{"number": number} for number in numbers]

    def build(self, example: Example) -> SingleTurn:
        first = example["number"] * self.count
        pictures = tuple(picture(i, self.side) for i in range(first, first + self.count))
        return SingleTurn((Message("user", f"{MARK * self.count}{example['number']}?", pictures=pictures),))

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        value = len(trajectory.answer.encode()) % 7 / 7
        return Reward(value, correct=value > 0.5)


@cache
def picture(number: int, side: int | None) -> Picture:
    return drawn(*(SIZES[number % len(SIZES)] if side is None else (side, side)), number)


LOOKING = {"_target_": "helpers.looking.Looking"}
