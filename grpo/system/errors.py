"""The exceptions a user is meant to read."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake in the set-up, in one line: what was wrong, what is allowed, what to do."""


def oneof(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises UserError where a setting is not one of the allowed words. name: its dotted key."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise UserError(f"{name}={value} is not one of {', '.join(map(str, allowed))}")


def check_least(name: str, value: float | None, least: float, more: str = "") -> None:
    """Raises UserError where a setting is below `least`; None passes. more: the end of the message."""
    if value is not None and value < least:
        raise UserError(f"{name}={value} must be at least {least}{more}")


class RolloutError(UserError):
    """A user's code that failed in a rollout, so that the run cannot go on. groups: all that was played when it happened, scored
    as far as it got."""

    def __init__(self, message: str, groups: Sequence = ()) -> None:
        super().__init__(message)
        self.groups = groups


class RewardError(RolloutError):
    """A reward that raised, or gave what is no reward. sample: which of those it was given, where that is known."""

    def __init__(self, message: str, sample: int | None = None, groups: Sequence = ()) -> None:
        super().__init__(message, groups)
        self.sample = sample


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the code that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f" ({Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno})" if frame else ""
    try:
        words = " ".join(str(error).split())[:1000]
    except Exception:  # of a user's class
        words = "(it cannot be told)"
    return f"{type(error).__name__}: {words}{place}"
