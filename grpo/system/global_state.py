"""Puts back what a user's function changes for the whole process, or for its thread, and names the function in one line.

Draws from the global random generators are not among it, nor are seeds of Python's and NumPy's: nothing of a run draws from them.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo.system.errors import RewardError

log = logging.getLogger(__name__)

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
_warned: set[tuple[str, str]] = set()  # (function, state), each of which is warned of once


@dataclass(frozen=True)
class _Seeded:
    """torch's generator; equal if it was not seeded in between. Draws do not count."""

    seed: int = field(default_factory=torch.initial_seed)
    state: Tensor = field(default_factory=torch.get_rng_state, compare=False, repr=False)

    def back(self) -> None:
        torch.set_rng_state(self.state)

    def __str__(self) -> str:
        return str(self.seed)


def _handlers() -> dict[str, Any]:
    main = threading.current_thread() is threading.main_thread()  # no other may set one
    return {kind.name: signal.getsignal(kind) for kind in SIGNALS} if main else {}


def _set_handlers(before: dict[str, Any]) -> None:
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)


def _environment() -> dict[bytes, bytes]:
    # os.environ.copy() decodes every value, a hundred times slower, and each call of a user's function reads it twice
    return {**os.environ._data}


def _set_environment(before: dict[bytes, bytes]) -> None:
    wanted = {os.fsdecode(name): os.fsdecode(value) for name, value in before.items()}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # how to read and to write each
    "the working directory": (os.getcwd, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    # not sys.stderr itself, which the next call would close
    "sys.stdout.closed": (
        lambda: getattr(sys.stdout, "closed", True),
        lambda _: setattr(sys, "stdout", os.fdopen(os.dup(2), "w")),
    ),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "signal handlers": (_handlers, _set_handlers),
    "torch's random seed": (_Seeded, _Seeded.back),
    "environment variables": (_environment, _set_environment),
}
# a warning is enough: honest code does this where it imports a library or draws
TOLERATED = ("torch's number of threads", "torch's random seed", "environment variables")


@contextmanager
def put_back(function: str) -> Iterator[None]:
    """Put back what a `with` block changes. function: what runs in it, for the message.

    Raises RewardError that names what was changed; what is TOLERATED is warned of, once.
    """
    before = {what: read() for what, (read, _) in STATES.items()}
    try:
        yield
    finally:
        refused = []
        for what, (read, write) in STATES.items():
            old, now = before[what], read()
            if now != old:
                write(old)
                line = f"{function} changed {what}{_change(old, now)}"
                if what not in TOLERATED:
                    refused.append(line)
                elif (function, what) not in _warned:
                    _warned.add((function, what))
                    log.warning(
                        "%s: it was put back; do this where the file is imported, or in a process of its own", line
                    )
    if refused:
        raise RewardError(f"{refused[0]}: restore it before returning, or do this work in a process of its own")


def _change(old: Any, now: Any) -> str:
    """Return a change in words: the old and the new value, but only the names of a mapping, since its values may be secret."""
    if isinstance(old, dict):
        changed = [os.fsdecode(name) for name in {*old, *now} if old.get(name) != now.get(name)]
        return f": {', '.join(sorted(changed))}"
    return f" from {old} to {now}"
