"""Grades an answer: extraction and arithmetic are done here, algebra by math-verify. Text in, verdict out.

Plain numbers, which are nearly all answers of word problems, are graded in this process, in microseconds. The rest goes to
worker processes, because math-verify and sympy may take minutes and gigabytes, and use the alarm signal.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from grpo.env.types import Outcome
from grpo.extras.grading.answers import (
    MAX_LENGTH,
    equal,
    extract_answer,
    for_algebra,
    loose_answer,
    readable,
    reading_of,
    sound,
)
from grpo.extras.grading.forms.structure import matched
from grpo.extras.workers.workers import WorkerError, Workers

DEADLINE = 4.5  # seconds, without those in which a worker waits for a core; real answers take 0.4 at most
MEMORY = 2**30  # bytes of a worker
WORKERS = min(4, os.cpu_count() or 1)

ALGEBRA = Workers("grpo.extras.grading.algebra.by_algebra", WORKERS, DEADLINE, MEMORY, warm_up=("x+1", "1+x"))


@lru_cache(maxsize=16384)
def _decide(answer: str, gold: str) -> Outcome:
    """Return the verdict. Raises TimeoutError and WorkerError, so that the cache holds only verdicts."""
    if not reading_of(gold).text:
        raise WorkerError("there is no gold answer")
    if len(answer) <= MAX_LENGTH and (same := equal(answer, gold)) is not None:
        return "right" if same else "wrong"
    if readable(answer) and readable(gold):
        same = matched(reading_of(answer).text, reading_of(gold).text, lambda x, y: _decide(x, y) == "right")
        if same is not None:
            return "right" if same else "wrong"
    if any(reading.kind and reading.kind.name == "words" for reading in map(reading_of, (answer, gold))):
        return "wrong"
    ours, theirs = for_algebra(answer, gold) if readable(answer) else ("", reading_of(gold).amount)
    outcome = ALGEBRA.call(ours, theirs)
    if outcome == "timeout":
        raise TimeoutError
    return outcome


def verdict(answer: str | None, gold: str) -> Outcome:
    """Return whether `answer` mathematically equals `gold`, from any thread, within DEADLINE once a worker is free.

    None is no_answer. Overlong, over-nested and unreadable answers are wrong; an unreadable `gold` is an error. timeout and
    error are no verdicts: never count them as wrong.
    """
    if answer is None:
        return "no_answer"
    try:
        return _decide(answer, gold)
    except TimeoutError:
        return "timeout"
    except WorkerError:
        return "error"


def unreadable(golds: Sequence[str | None]) -> list[int]:
    """Return the places of the right answers that neither arithmetic nor algebra can read; None is no answer, and is left out.

    A worker is asked only about those that `sound` is not sure of.
    """
    places: dict[str, list[int]] = {}
    for place, gold in enumerate(golds):
        if gold is not None and reading_of(gold).value is None and not sound(gold):
            places.setdefault(gold, []).append(place)
    if not places:
        return []
    with ThreadPoolExecutor(WORKERS) as pool:
        # the answer is a number that is no right answer
        outcomes = pool.map(lambda gold: verdict("12345678987654321", gold), places)
        bad = [gold for gold, outcome in zip(places, outcomes, strict=True) if outcome == "error"]
    return sorted(place for gold in bad for place in places[gold])


class Mathematics:
    """The `Grader` of `correct`."""

    claimed = staticmethod(extract_answer)
    found = staticmethod(loose_answer)
    verdict = staticmethod(verdict)
    unreadable = staticmethod(unreadable)


MATHEMATICS = Mathematics()
