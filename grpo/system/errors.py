"""Exceptions whose text is for the user, and words for it."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path


class UserError(ValueError):
    """A mistake in the set-up, in one line: what was wrong, what is allowed, what to do."""

    exit_code = 1  # of the program
    kind = "error: "  # before the line
    saves = True  # whether a run that it ends may write a checkpoint


class AlarmError(UserError):
    """A metric or a weight shows that the run has gone wrong."""

    exit_code = 4
    saves = False


class PreflightError(UserError):
    """A check before the first rollout failed."""

    exit_code = 3


class MissingRows(UserError):
    """The rows of a task are not on this machine, and the hub does not give them."""


class LostRank(UserError):
    """Another rank of the run has ended or hangs. The run can be resumed."""

    exit_code = 5
    saves = False


class StopError(UserError):
    """The run was asked to end, and can be resumed. reason: a signal, or max_time. later: what the same command does then."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again
    kind = ""

    def __init__(self, reason: str, later: str = "") -> None:
        super().__init__(f"stopped by {reason}; {later or 'the same command with resume=auto continues the run'}")
        self.reason = reason


class RolloutError(UserError):
    """A user's code failed in a rollout, and the run cannot continue. groups: everything played so far, with the rewards
    that are known."""

    def __init__(self, message: str, groups: Sequence = ()) -> None:
        super().__init__(message)
        self.groups = groups


class RewardError(RolloutError):
    """A reward function raised, or returned something that is no reward. sample: the index of the sample, if known."""

    def __init__(self, message: str, sample: int | None = None, groups: Sequence = ()) -> None:
        super().__init__(message, groups)
        self.sample = sample


def lacks_memory(error: BaseException) -> bool:
    """Return whether numpy, torch or a device had too little memory."""
    torch_lacks_it = isinstance(error, RuntimeError) and re.search("out of memory|can't allocate", str(error))
    return isinstance(error, MemoryError) or bool(torch_lacks_it)


def one_line(words: object, most: int = 1000) -> str:
    """Return a text, or what an object says of itself, in one line of at most so many characters."""
    return " ".join(str(words).split())[:most]


def error_line(error: BaseException) -> str:
    """Return an exception in one line, with the place in the code that raised it."""
    places = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    try:
        words = one_line(error)
    except Exception:  # a user's class may fail here
        words = "(it is unknown)"
    return f"{type(error).__name__}: {words}{place}"


def plural(count: int, noun: str, more: str = "") -> str:
    """Return a count with its noun: `1 job`, `2 jobs`, `1,000 jobs`. more: the plural, if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else more or noun + 's'}"
