"""Grades an answer: extraction and arithmetic are done here, algebra by math-verify. Text in, verdict out.

Plain numbers, which are nearly all answers of word problems, are graded in this process, in microseconds. The rest goes to
worker processes, because math-verify and sympy may take minutes and gigabytes, and use the alarm signal.
"""

import os
from functools import lru_cache

from grpo.env.types import Outcome
from grpo.rewards.math.answers import MAX_LENGTH, equal, readable, reading_of, for_algebra
from grpo.system.workers import WorkerError, Workers

DEADLINE = 4.5  # seconds, without those in which a worker waits for a core; real answers take 0.4 at most
MEMORY = 2**30  # bytes of a worker
WORKERS = min(4, os.cpu_count() or 1)

_OUTCOME: dict[bool, Outcome] = {True: "right", False: "wrong"}
ALGEBRA = Workers("grpo.rewards.math.algebra.by_algebra", WORKERS, DEADLINE, MEMORY, warm_up=("x+1", "1+x"))


@lru_cache(maxsize=16384)
def _decide(answer: str, gold: str) -> Outcome:
    """Return the verdict. Raises TimeoutError and WorkerError, so that the cache holds only verdicts."""
    if not reading_of(gold).text:
        raise WorkerError("there is no gold answer")
    if len(answer) <= MAX_LENGTH and (known := equal(answer, gold)) is not None:
        return _OUTCOME[known]
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
