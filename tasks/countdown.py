"""Countdown: reach a target from a few given numbers with + - * /. A seed generates the puzzles, without end.

Using each of the numbers 3, 7, 25 exactly once ... that equals 46.
<answer>(25 - 3) * 7</answer>  is wrong,  <answer>25 + 3 * 7</answer>  is right
"""

import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any

from grpo.data.rows import Made, side
from grpo.env.messages import Message
from grpo.env.thoughts import after_thoughts
from grpo.env.types import Example, Reward, Split
from grpo.extras.grading.answers import boxed
from grpo.extras.grading.arithmetic import value
from grpo.rewards.combined import Weights, text_of
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import RowTask, chosen
from grpo.system.errors import UserError
from grpo.system.ranges import Range, Whole, enforced

HELD_OUT = {"test": 0.1, "validation": 0.1}  # shares of all possible puzzles
LONGEST = 200  # characters of an expression that are read
_NUMBER = r"[\s(]*[1-9][0-9]*[\s)]*"
# no signs, no powers, and an operator between all numbers
EXPRESSION = re.compile(rf"{_NUMBER}(?:[-+*/]{_NUMBER})*")
QUESTION = (
    "Using each of {numbers} exactly once, with + - * / and parentheses, write an expression that equals {target}."
)
FORM = "Think first, then give the expression alone in <answer> </answer>, for example <answer>(1 + 2) / 3</answer>."
PROMPTS = {
    "chat": lambda question: (Message("user", f"{question} {FORM}"),),
    "base": lambda question: (Message("user", f"Question: {question} {FORM}\nAnswer: Let me think step by step."),),
}


def answer(text: str) -> str | None:
    """Return the expression that a completion claims: the last <answer>, else the last box; up to any `=`, and with * and / for
    the signs that schools use."""
    text = after_thoughts(text)
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    expression = (tagged[-1] if tagged else boxed(text)) or ""
    return expression.partition("=")[0].strip().translate({0xD7: "*", 0xF7: "/"}) or None


def solved(
    completions: Sequence[Any], numbers: Sequence[Sequence[int]], target: Sequence[int], **columns: Any
) -> list[Reward]:
    """1 for an expression of exactly the given numbers, each once, that equals the target."""
    rewards = []
    for completion, allowed, wanted in zip(completions, numbers, target, strict=True):
        expression = answer(text_of(completion))
        right = (
            _is_expression(expression)
            and value(expression) == int(wanted)
            and sorted(map(int, re.findall("[0-9]+", expression))) == sorted(map(int, allowed))
        )
        outcome = "right" if right else "wrong"
        if expression is None:
            outcome = "no_answer"
        rewards.append(Reward(float(right), right, outcome=outcome))
    return rewards


def form(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for an expression that `answer` finds, whatever its numbers and its value."""
    return [float(_is_expression(answer(text_of(completion)))) for completion in completions]


def _is_expression(text: str | None) -> bool:
    return text is not None and len(text) <= LONGEST and EXPRESSION.fullmatch(text) is not None


def draw(rng: random.Random, count: int, largest: int) -> Example:
    """Return a puzzle that has a solution: its target is the value of some expression of the numbers."""
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        terms = [Fraction(number) for number in numbers]
        while len(terms) > 1:
            left, right = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
            quotient = left / right if right else left
            terms.append(rng.choice([left + right, left - right, left * right, quotient]))
        if terms[0].denominator == 1 and 10 <= terms[0] <= 100 and terms[0] not in numbers:
            return {"numbers": numbers, "target": int(terms[0])}


class Countdown(RowTask):
    """numbers: how many numbers are given, one of these; largest: the largest of them."""

    gold_column = "target"
    usual_weights = MappingProxyType({"form": 0.1})

    @enforced("task")
    def __init__(
        self,
        prompt: str = "chat",
        rewards: Functions = (solved, form),
        weights: Weights = None,
        numbers: Sequence[Annotated[int, Range(2, 6)]] = (3, 4),
        largest: Annotated[int, Range(10)] = 99,
        sizes: Mapping[Split, Whole] | None = None,
        seed: Whole = 0,
    ) -> None:
        if not numbers:
            raise UserError("task.numbers=[] must be some of 2 to 6")
        self.sizes = {"train": 20000, "validation": 500, "test": 500, **(sizes or {})}
        self.template = chosen(PROMPTS, prompt)
        self.numbers, self.largest, self.seed = tuple(numbers), largest, seed
        super().__init__(self, rewards, weights)

    def split(self, split: Split) -> Sequence[Example]:
        if self.sizes.get(split, 0) < 1:
            raise UserError(f"there is no split {split!r}: task.sizes={self.sizes}")
        return Made(self.sizes[split], lambda i: self.puzzle(split, i))

    def puzzle(self, split: Split, place: int) -> Example:
        """Draw row `place` of a split. A hash of numbers and target decides the split, so that splits share no puzzle."""
        rng = random.Random(f"{split} {self.seed} {place}")
        while True:
            row = draw(rng, rng.choice(self.numbers), self.largest)
            if side([sorted(row["numbers"]), row["target"]], HELD_OUT) == split:
                return row

    def messages(self, example: Example) -> tuple[Message, ...]:
        numbers = ", ".join(map(str, example["numbers"]))
        return self.template(QUESTION.format(numbers=numbers, target=example["target"]))
