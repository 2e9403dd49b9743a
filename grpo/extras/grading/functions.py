"""The built-in reward functions, which `task.rewards` knows by name. Text in, one number per sample out.

Arguments after the columns are set in YAML, as {_target_: grpo.extras.grading.functions.longer, _partial_: true, per: 100}.
Lengths are tokens if the columns contain them, else characters.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo.env.thoughts import after_thoughts
from grpo.env.types import Reward
from grpo.extras.grading.answers import extract_answer
from grpo.extras.grading.grading import MATHEMATICS, verdict
from grpo.extras.grading.worked import copied, unworked
from grpo.rewards.basic import Completions, environment, ungraded  # noqa: F401 - by an old name of this module
from grpo.rewards.combined import text_of
from grpo.rewards.grader import graded
from grpo.rewards.resolve import Function, locate, reward_name
from grpo.system.errors import UserError
from grpo.system.ranges import Count, NonNegative, Positive, Whole


def correct(
    completions: Completions,
    gold: Sequence[Any],
    wrong: float = 0.0,
    prompts: Completions | None = None,
    **columns: Any,
) -> list[Reward]:
    """1 for an answer (the last box, else after the last ####) mathematically equal to `gold`, `wrong` for any other or none.
    An answer that leaves the work to the grader (`worked`) is wrong: a calculation, or a formula of the question.
    NaN if the grader ran out of time or failed, or if the right answer is unknown (None)."""
    rewards = []
    for completion, right, prompt in zip(completions, gold, prompts or [""] * len(completions), strict=True):
        answer = extract_answer(text_of(completion))
        outcome = "error" if right is None else verdict(answer, str(right))
        if outcome == "right" and _leaves_work(answer, str(right), prompt):
            outcome = "wrong"
        rewards.append(graded(outcome, wrong))
    return rewards


correct.grader = MATHEMATICS


def last_number(completions: Completions, gold: Sequence[Any], wrong: float = 0.0, **columns: Any) -> list[Reward]:
    """1 if the last number after any thought equals `gold`, `wrong` if not: for models that do not box their answers."""
    rewards = []
    for completion, right in zip(completions, gold, strict=True):
        numbers = _numbers(completion)
        outcome = verdict(numbers[-1], str(right)) if numbers else "no_answer"
        rewards.append(graded(outcome, wrong))
    return rewards


def near_number(completions: Completions, gold: Sequence[Any], **columns: Any) -> list[float]:
    """1 / (1 + |gold - the last number after any thought|): 1 if it is right, 0 without a number."""
    rewards = []
    for completion, right in zip(completions, gold, strict=True):
        numbers, wanted = _numbers(completion), float(str(right).replace(",", ""))
        rewards.append(1 / (1 + abs(wanted - float(numbers[-1]))) if numbers else 0.0)
    return rewards


def _numbers(completion: Any) -> list[str]:
    return re.findall(r"-?(?:\d+(?:\.\d+)?|\.\d+)", after_thoughts(text_of(completion)).replace(",", ""))


def _leaves_work(answer: str, gold: str, prompt: str | Sequence[Mapping[str, str]]) -> bool:
    """Return whether an answer that equals `gold` leaves the work to the grader. The last message of a prompt is the question;
    earlier ones are worked examples."""
    question = prompt
    if not isinstance(prompt, str):
        question = prompt[-1]["content"] if prompt else ""
    return unworked(answer, gold) or copied(answer, gold, question)


def _says_something(text: str | None) -> bool:
    return any(map(str.isalnum, text or ""))


def format(completions: Completions, **columns: Any) -> list[float]:
    """1 for an answer in a form that `correct` reads, with at least one letter or digit."""
    return [float(_says_something(extract_answer(text_of(completion)))) for completion in completions]


def think_answer(completions: Completions, **columns: Any) -> list[float]:
    """1 for exactly <think>...</think><answer>...</answer>, each tag once and with a letter or digit inside."""
    tags = r"</?(?:think|answer)>"
    form = re.compile(rf"<think>((?:(?!{tags}).)*)</think>\s*<answer>((?:(?!{tags}).)*)</answer>\s*", re.DOTALL)
    matches = [form.fullmatch(text_of(completion)) for completion in completions]
    return [float(bool(match) and all(map(_says_something, match.groups()))) for match in matches]


def think_levels(completions: Completions, **columns: Any) -> list[float]:
    """A quarter for each of these, in order: <think> is there, </think> comes after it, each occurs once, and neither the
    thought nor the text after it is empty."""

    def level(text: str) -> float:
        _, opened, rest = text.partition("<think>")
        thought, closed, answer = rest.partition("</think>")
        once = text.count("<think>") == text.count("</think>") == 1
        steps = (opened, closed, once, _says_something(thought) and _says_something(answer))
        return next((i for i, step in enumerate(steps) if not step), len(steps)) / len(steps)

    return [level(text_of(completion)) for completion in completions]


def at_least(
    completions: Completions, tokens: int = 10, lengths: Sequence[int] | None = None, **columns: Any
) -> list[Reward | None]:
    """NaN for a sample with fewer tokens, which makes its whole reward NaN: nothing is learned from it."""
    return [None if size >= tokens else Reward(math.nan, False) for size in _sizes(completions, lengths)]


def longer(completions: Completions, per: float = 1.0, **columns: Any) -> list[float]:
    """Characters / per."""
    return [len(text_of(completion)) / per for completion in completions]


def near_length(completions: Completions, target: Whole = 20, **columns: Any) -> list[float]:
    """-|target - characters|."""
    return [-float(abs(target - len(text_of(completion)))) for completion in completions]


def unique_letters(completions: Completions, **columns: Any) -> list[float]:
    """The number of different characters: a reward that any model can raise, in any language."""
    return [float(len(set(text_of(completion)))) for completion in completions]


def _sizes(completions: Completions, lengths: Sequence[int] | None) -> list[int]:
    return list(lengths) if lengths is not None else [len(text_of(completion)) for completion in completions]


def overlong(
    completions: Completions, limit: int, buffer: Positive, lengths: Sequence[int] | None = None, **columns: Any
) -> list[float]:
    """0 up to limit - buffer, then falling linearly to -1 at the limit (arXiv 2503.14476, eq. 13)."""
    return [-min(max((size - limit + buffer) / buffer, 0.0), 1.0) for size in _sizes(completions, lengths)]


def long_when_all_right(
    completions: Completions, gold: Sequence[str], limit: int, lengths: Sequence[int] | None = None, **columns: Any
) -> list[float]:
    """If every sibling is right, only length is left to learn from: 0 up to limit / 2, then falling linearly to -1 at the
    limit. 0 for all if one is wrong."""
    if not all(reward.correct for reward in correct(completions, gold, prompts=columns.get("prompts"))):
        return [0.0] * len(completions)
    return overlong(completions, limit, limit / 2, lengths)


def cosine_length(
    completions: Completions,
    gold: Sequence[str],
    limit: Count = 1000,
    right: tuple[float, float] = (0.5, 1.0),
    wrong: tuple[float, float] = (-1.0, -0.5),
    lengths: Sequence[int] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Shorter right answers earn more, shorter wrong answers lose more, along half a cosine up to `limit`
    (arXiv 2502.03373, sec. 4.2). right and wrong: (least, most), of any sign. None if the grader reached no verdict."""
    for name, (least, most) in (("right", right), ("wrong", wrong)):
        if least > most:
            fix = "give the least first, or length would be paid in the other direction"
            raise UserError(f"cosine_length: {name}=[{least}, {most}] must be [least, most]: {fix}")

    def value(reward: Reward, size: int) -> float | None:
        if not reward.known:
            return None
        long, short = right if reward.correct else wrong[::-1]
        return long + (short - long) * (1 + math.cos(math.pi * min(size / limit, 1.0))) / 2

    graded = correct(completions, gold, prompts=columns.get("prompts"))
    return list(map(value, graded, _sizes(completions, lengths)))


def repetition(completions: Completions, size: Count = 3, most: NonNegative = 1.0, **columns: Any) -> list[float]:
    """-most x the share of n-grams (of `size` words) that occurred earlier in the text (arXiv 2502.03373, app. C)."""

    def share(text: str) -> float:
        words = text.lower().split()
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    return [-most * share(text_of(completion)) for completion in completions]


class Normalised:
    """Another function's values, clamped to [low, high] and scaled to [0, 1]; 0 if low equals high."""

    def __init__(self, function: str | Function, low: float, high: float) -> None:
        if low > high:
            raise UserError(f"a reward normalised from low={low} to high={high}: low must not be above high")
        self.function = locate(function) if isinstance(function, str) else function
        self.low, self.high, self.__name__ = low, high, reward_name(self.function)
        self.__wrapped__ = self.function  # its signature counts

    def __call__(self, **columns: Any) -> Any:
        values = self.function(**columns)
        return self._later(values) if inspect.isawaitable(values) else list(map(self._scaled, values))

    async def _later(self, values: Any) -> list[float | Reward | None]:
        return list(map(self._scaled, await values))

    def _scaled(self, value: float | Reward | None) -> float | Reward | None:
        if isinstance(value, Reward):
            return replace(value, value=self._scaled(value.value))
        if value is None or math.isnan(value):
            return value
        return (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or math.inf)
