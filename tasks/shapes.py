"""Pictures of a coloured shape in noise, with a question: its colour, or where it is. A tiny model that sees learns to answer.

    <image>What color is the shape?
    blue

Nothing is stored or downloaded: a row is a function of the seed and its index, and its picture is drawn when its episode begins.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from grpo.data.rows import Made
from grpo.env.messages import Message
from grpo.env.pictures import MARK, Picture, picture_from
from grpo.env.types import Example, Split, State
from grpo.rewards.basic import Completions
from grpo.rewards.combined import Weights, text_of
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import Count, NonNegative, Whole, enforced

SIDE = 56  # pixels of a picture
COLORS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (60, 80, 240), "yellow": (240, 220, 40)}
FORMS = ("square", "disc", "cross", "ring")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTIONS = {"color": "What color is the shape?", "place": "Where is the shape?"}
ANSWERS = {"color": tuple(COLORS), "place": PLACES}
GREY = 40.0  # of the ground, of 255
SPLITS = ("train", "validation", "test")


def said(completions: Completions, gold: Sequence[str], **columns: Any) -> list[float]:
    """1 for the right answer and nothing else, 0 for any other text."""
    return [float(text_of(one).split() == right.split()) for one, right in zip(completions, gold, strict=True)]


def words(completions: Completions, gold: Sequence[str], **columns: Any) -> list[float]:
    """The share of the right answer's words that stand in their places; 0 for more or fewer words."""

    def share(said: list[str], right: list[str]) -> float:
        same = sum(one == other for one, other in zip(said, right, strict=False))
        return same / len(right) if len(said) == len(right) else 0.0

    return [share(text_of(one).split(), right.split()) for one, right in zip(completions, gold, strict=True)]


def form(name: str, half: int) -> np.ndarray:
    """Return where a shape is, as booleans, [2 half, 2 half]."""
    y, x = np.abs(np.mgrid[: 2 * half, : 2 * half] - half + 0.5)
    radius = np.hypot(x, y)
    forms = {
        "square": radius >= 0,
        "disc": radius < half,
        "cross": np.minimum(x, y) < half / 3,
        "ring": (radius < half) & (radius > half / 2),
    }
    return forms[name]


def drawn(row: Example, noise: float) -> Picture:
    """Return the picture of a row. noise: the standard deviation of what is added to each colour of a pixel, of 255."""
    return painted(row["image"], row["color"], row["form"], row["place"], noise)


@lru_cache(maxsize=256)  # a group of samples asks for the same one
def painted(drawing: int, color: str, shape: str, place: str, noise: float) -> Picture:
    """Return a picture of a shape, at random in a quarter of it."""
    from PIL import Image

    rng = np.random.default_rng(drawing)
    half, middle = int(rng.integers(8, 11)), SIDE // 2
    below, right = divmod(PLACES.index(place), 2)
    top, left = rng.integers(0, middle - 2 * half + 1, 2) + np.array([below, right]) * middle
    pixels = np.full((SIDE, SIDE, 3), GREY)
    pixels[top : top + 2 * half, left : left + 2 * half][form(shape, half)] = COLORS[color]
    pixels += noise * rng.standard_normal(pixels.shape)
    return picture_from(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))


def row(split: Split, seed: int, place: int, kinds: Sequence[str] = ("color", "place")) -> Example:
    """Return a row of a split: a question of one of these kinds, its answer, and what its picture is drawn from."""
    rng = random.Random(f"{split} {seed} {place}")
    kind = rng.choice(kinds)
    question = QUESTIONS[kind]
    made = {"color": rng.choice(list(COLORS)), "form": rng.choice(FORMS), "place": rng.choice(PLACES)}
    return {"question": question, "answer": made[kind], "type": kind, **made, "image": rng.getrandbits(32)}


def guesses(count: int, seed: int) -> list[State]:
    """Return questions with random answers, which teach a model the form of an answer and nothing of pictures."""
    rng = random.Random(f"guesses {seed}")
    rows = [row("train", seed, -1 - i) for i in range(count)]
    return [guess(drawn(one, 20.0), one["question"], rng.choice(ANSWERS[one["type"]])) for one in rows]


def asked(picture: Picture, question: str) -> Message:
    """Return a question about a picture."""
    return Message("user", MARK + question, pictures=(picture,))


def guess(picture: Picture, question: str, answer: str) -> State:
    """Return a question about a picture, with an answer."""
    return State((asked(picture, question), Message("assistant", answer)))


class Shapes(RowTask):
    """ask: for the color of a shape, for its place, or for either. noise: of the pictures, see `drawn`. blind: every picture is
    the same grey, a control. There are as many validation rows as test rows."""

    @enforced("task")
    def __init__(
        self,
        ask: Literal["color", "place", "both"] = "color",
        noise: NonNegative = 20.0,
        blind: bool = False,
        train_size: Count = 20000,
        test_size: Count = 500,
        seed: Whole = 0,
        rewards: Functions = (said,),
        weights: Weights = None,
    ) -> None:
        self.kinds = ("color", "place") if ask == "both" else (ask,)
        self.noise, self.blind, self.seed = noise, blind, seed
        self.sizes = dict(zip(SPLITS, (train_size, test_size, test_size), strict=True))
        super().__init__(self, rewards, weights)

    def split(self, split: Split) -> Sequence[Example]:
        if split not in self.sizes:
            raise UserError(f"there is no split {split!r}: choose {', '.join(self.sizes)}")
        return Made(self.sizes[split], lambda i: row(split, self.seed, i, self.kinds))

    def messages(self, example: Example) -> tuple[Message, ...]:
        from PIL import Image

        grey = (int(GREY),) * 3
        picture = picture_from(Image.new("RGB", (SIDE, SIDE), grey)) if self.blind else drawn(example, self.noise)
        return (asked(picture, example["question"]),)
