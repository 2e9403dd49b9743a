"""Grader: what a task asks about answers. extras/grading has the one for mathematics; `SameText` needs nothing.

A reward function that grades says so with an attribute `grader`. Evaluations ask the same one: docs/evaluation.md.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from grpo.env.thoughts import after_thoughts
from grpo.env.types import Outcome, Reward

MARKER = "####"


class Grader(Protocol):
    """Reads and compares answers. Called in threads, several at once."""

    def claimed(self, text: str) -> str | None:
        """The answer in the place where the reward looks for it; None if there is none."""

    def found(self, text: str) -> str | None:
        """The answer that a reader would find anywhere in the text; None if there is none."""

    def verdict(self, answer: str | None, gold: str) -> Outcome:
        """Whether an answer is right. Neither timeout nor error says that it is wrong."""

    def unreadable(self, golds: Sequence[str | None]) -> list[int]:
        """The places of right answers that it cannot read, for a warning. None is no answer, and is left out."""


class SameText:
    """The text after the last #### of a line, which must be that of the right answer. Runs of spaces count as one."""

    def claimed(self, text: str) -> str | None:
        _, marker, rest = after_thoughts(text).rpartition(MARKER)
        return rest.partition("\n")[0].strip() or None if marker else None

    found = claimed

    def verdict(self, answer: str | None, gold: str) -> Outcome:
        if answer is None:
            return "no_answer"
        return "right" if answer.split() == gold.split() else "wrong"

    def unreadable(self, golds: Sequence[str | None]) -> list[int]:
        return []


def graded(outcome: Outcome, wrong: float = 0.0) -> Reward:
    """Return the reward of an outcome: 1, or `wrong`."""
    # Other libraries count an answer as wrong if the grader fails. That would teach the policy to avoid long right answers.
    value = {"right": 1.0, "timeout": math.nan, "error": math.nan}.get(outcome, wrong)
    return Reward(value, outcome == "right", outcome=outcome)
