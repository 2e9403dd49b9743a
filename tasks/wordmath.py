"""Word problems of the GSM8K form, made from templates: a task with a reasoning chain that a tiny model can learn.

    Sam has 14 coins. Sam buys 3 bags of 4 coins. Sam loses 5 coins. How many coins does Sam have?
    3*4=12
    14+12=26
    26-5=21
    \\boxed{21}

A step is a line of the worked answer. Nothing is stored or downloaded: a row is a function of the seed and its index.
"""

import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated

from grpo.data.rows import Made, key_of
from grpo.env.messages import Message
from grpo.env.types import Example, Split, State
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Range, Whole, enforced

NAMES = ("Sam", "Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida")
THINGS = ("coins", "books", "cards", "shells", "apples", "stamps", "pens", "stones")
LARGEST = 99  # no number in a problem or its working is larger by default
MOST_STEPS = 8
Steps = Annotated[int, Range(2, MOST_STEPS)]
TEST_SHARE = 10  # one question in this many belongs to the test side
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class Event:
    """An event of the story: the operator applies {n} to the number of things; {each}, if given, multiplies {n}."""

    operator: str
    text: str
    question: str = ""  # an event that ends the story asks for something other than the things

    @property
    def lines(self) -> int:
        return 2 if "{each}" in self.text else 1


EVENTS = (
    Event("+", "{name} finds {n} {things}."),
    Event("+", "{name} buys {n} more {things}."),
    Event("+", "{name} buys {n} bags of {each} {things}."),
    Event("+", "{friend} gives {name} {n} boxes of {each} {things}."),
    Event("-", "{name} loses {n} {things}."),
    Event("-", "{name} gives {n} {things} to {friend}."),
    Event("*", "Now {name} gets {n} times as many {things}."),
    Event("*", "{name} sells all the {things} for {n} dollars each.", "How many dollars does {name} get?"),
    Event("/", "{name} packs all the {things} into boxes of {n}.", "How many boxes does {name} fill?"),
)


@dataclass(frozen=True)
class Problem:
    """A word problem: a start number, then events that change it."""

    question: str
    start: int
    sums: tuple[tuple[str, int, int | None], ...]  # operator, n, each; one for every event

    def lines(self, rng: random.Random, slips: float) -> Iterator[tuple[str, int]]:
        """Yield the working, line by line, with the result of each; later lines use the result of a slip."""

        def line(left: int, sign: str, right: int) -> tuple[str, int]:
            result = OPERATORS[sign](left, right)
            if rng.random() < slips:
                result = abs(result + rng.choice((-10, -2, -1, 1, 2, 10)))
            return f"{left}{sign}{right}={result}", result

        value = self.start
        for sign, n, each in self.sums:
            if each is not None:
                text, n = line(n, "*", each)
                yield text, n
            text, value = line(value, sign, n)
            yield text, value

    def working(self, rng: random.Random, hasty: float = 0.0, slips: float = 0.0) -> tuple[list[str], int]:
        """Return the lines that the author writes, and the result so far. A hasty author may stop before any line."""
        written, value = [], self.start
        lines = self.lines(rng, slips)
        while rng.random() >= hasty and (line := next(lines, None)):
            text, value = line
            written.append(text)
        return written, value

    def worked(self, rng: random.Random, hasty: float = 0.0, slips: float = 0.0) -> tuple[str, int]:
        """Return the worked answer, which ends with its result in a box, and the result."""
        written, value = self.working(rng, hasty, slips)
        return "\n".join([*written, f"\\boxed{{{value}}}"]), value


def draw(rng: random.Random, steps: int, largest: int = LARGEST) -> Problem:
    """Return a problem whose worked answer has `steps` lines, and no number above `largest`."""
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}
    most = math.isqrt(largest)  # so that a product of two given numbers fits
    start = value = rng.randint(3, 2 * most + 2)
    story, sums = [f"{name} has {value} {words['things']}."], []
    question = "How many {things} does {name} have?"
    while steps:
        event, n = rng.choice(EVENTS), rng.randint(2, most)
        each = rng.randint(2, most) if event.lines == 2 else None
        amount = n * (each or 1)
        result = OPERATORS[event.operator](value, amount)
        divides = event.operator != "/" or value % amount == 0
        if event.lines > steps or (event.question and steps > 1) or not (divides and 2 <= result <= largest):
            continue
        story.append(event.text.format(n=n, each=each, **words))
        sums.append((event.operator, n, each))
        question = event.question or question
        value, steps = result, steps - event.lines
    return Problem(" ".join([*story, question.format(**words)]), start, tuple(sums))


def side(question: str) -> Split:
    """Return the split that a question may appear in: a stable hash of its text decides, whoever draws it."""
    return "test" if key_of(question) % TEST_SHARE == 0 else "train"


def draw_from(split: Split, rng: random.Random, steps: Sequence[int], largest: int = LARGEST) -> Problem:
    """Draw problems until one belongs to the split. steps: the least and the largest number of events."""
    while True:
        problem = draw(rng, rng.randint(*steps), largest)
        if side(problem.question) == split:
            return problem


def worked_answers(
    count: int, seed: int, hasty: float = 0.0, slips: float = 0.0, steps: Sequence[int] = (2, 4)
) -> list[State]:
    """Return questions of the train side with their worked answers, to warm up a model.

    hasty: probability, before each line, that the author stops and boxes the result so far.
    slips: probability that a line is miscalculated.
    """
    rng = random.Random(f"worked answers {seed}")
    problems = (draw_from("train", rng, steps) for _ in range(count))
    turns = ((problem.question, problem.worked(rng, hasty, slips)[0]) for problem in problems)
    return [State((Message("user", question), Message("assistant", answer))) for question, answer in turns]


class Wordmath(RowTask):
    """steps: the fewest and the most lines of a worked answer, inclusive. largest: the limit of all numbers in a problem and its
    working. There are as many validation rows as test rows."""

    usual_weights = MappingProxyType({"format": 0.0})
    demonstration_column: str | None = "solution"

    @enforced("task")
    def __init__(
        self,
        steps: tuple[Steps, Steps] = (2, 4),
        train_size: Count = 20000,
        test_size: Count = 500,
        seed: Whole = 0,
        largest: Annotated[int, Range(LARGEST)] = LARGEST,
        rewards: Functions = ("correct", "format"),
        weights: Weights = None,
    ) -> None:
        if steps[0] > steps[1]:
            raise UserError(f"task.steps={list(steps)} must be [fewest, most] with 2 <= fewest <= most <= {MOST_STEPS}")
        self.steps, self.seed, self.largest = tuple(steps), seed, largest
        self.train_size, self.test_size = train_size, test_size
        super().__init__(self, rewards, weights)

    def split(self, split: Split) -> Sequence[Example]:
        if split == "train":
            return Made(self.train_size, lambda i: self.row("train", i))
        if split in ("validation", "test"):
            return self.held_out[split]
        raise UserError(f"there is no split {split!r}: choose train, validation or test")

    def row(self, side: Split, place: int) -> Example:
        """Return row `place` of a side, with its worked solution."""
        rng = random.Random(f"{side} {self.seed} {place}")
        problem = draw_from(side, rng, self.steps, self.largest)
        solution, answer = problem.worked(rng)
        steps = solution.count("\n")
        return {"question": problem.question, "answer": str(answer), "steps": steps, "solution": solution}

    @cached_property
    def held_out(self) -> dict[Split, Sequence[Example]]:
        """The first `test_size` different questions of the test side for test, and as many after them for validation: a row that
        counts twice would make confidence intervals too narrow."""
        by_question: dict[str, Example] = {}
        for row in Made(20 * self.test_size, lambda i: self.row("test", i)):
            by_question.setdefault(row["question"], row)
            if len(by_question) == 2 * self.test_size:
                break
        rows = list(by_question.values())
        return {"test": rows[: self.test_size], "validation": rows[self.test_size :]}

    def messages(self, example: Example) -> tuple[Message, ...]:
        return (Message("user", example["question"]),)
