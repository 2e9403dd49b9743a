"""A task with a picture in each row, for runs that take seconds."""

from grpo.env.messages import Message
from grpo.env.pictures import MARK
from grpo.env.types import Example, Reward, SingleTurn, Trajectory
from helpers.seeing import drawn

SIZES = ((28, 28), (56, 28), (40, 64))


class Looking:
    """Questions with a picture of noise each, of several sizes. The reward differs between samples of a random model. count: of
    pictures in a row; side: pixels of square ones, None for SIZES."""

    def __init__(self, count: int = 1, side: int | None = None) -> None:
        self.count, self.side = count, side

    def examples(self, split: str) -> list[Example]:
        return [{"number": number} for number in (range(100) if split == "train" else range(100, 108))]

    def build(self, example: Example) -> SingleTurn:
        first = example["number"] * self.count
        sizes = [
            SIZES[i % len(SIZES)] if self.side is None else (self.side,) * 2 for i in range(first, first + self.count)
        ]
        pictures = tuple(drawn(*size, first + i) for i, size in enumerate(sizes))
        return SingleTurn((Message("user", f"{MARK * self.count}{example['number']}?", pictures=pictures),))

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        value = len(trajectory.answer.encode()) % 7 / 7
        return Reward(value, correct=value > 0.5)


LOOKING = {"_target_": "helpers.looking.Looking"}
