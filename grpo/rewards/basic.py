"""Reward functions that need no appendix. `task.rewards` knows them by name, beside those of extras/grading/functions.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.env.types import Reward
from grpo.rewards.combined import text_of
from grpo.rewards.grader import SameText, graded

Completions = Sequence[str] | Sequence[Sequence[Mapping[str, str]]]


def same_text(completions: Completions, gold: Sequence[Any], wrong: float = 0.0, **columns: Any) -> list[Reward]:
    """1 if the text after the last #### is that of `gold`, `wrong` if not. NaN if the right answer is unknown (None)."""
    grader, texts = same_text.grader, map(text_of, completions)
    pairs = zip(texts, gold, strict=True)
    return [
        graded("error" if right is None else grader.verdict(grader.claimed(text), str(right)), wrong)
        for text, right in pairs
    ]


same_text.grader = SameText()


def environment(outcomes):
    """Return the rewards that the environments gave; a sample whose environment gave none has no value here."""
    return outcomes


def ungraded(completions: Completions, **columns: Any) -> list[float]:
    """0 for each: nothing is graded. For a run whose loss has no reward, as with algo=opd; its accuracy is 0."""
    return [0.0] * len(completions)
