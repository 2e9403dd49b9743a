"""Starts processes that end with their parent. Imports only the standard library.

This file, run as a command, is a guard between parent and child: it holds a pipe from the parent, and ends the child's whole
process group when the pipe closes, for whatever reason.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

GRACE = 10.0  # seconds for a process to end by itself


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a command and return its guard, which ends with it and has its exit code. options: of Popen, for both."""
    guarded = [sys.executable, "-P", __file__, *command]  # -P: the modules of this folder are not top-level modules
    # a session of its own: Ctrl-C reaches only the process that started it
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True, **options)


def stop(guards: Iterable[subprocess.Popen]) -> None:
    """End the commands, all at once, and wait until they have ended."""
    guards = list(guards)
    for guard in guards:
        guard.stdin.close()
    for guard in guards:
        try:
            guard.wait(2 * GRACE)
        except subprocess.TimeoutExpired:
            guard.terminate()


def guard(command: Sequence[str]) -> int:
    """Run a command until it ends or the parent process does. Returns its exit code."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        # a fork of the parent may keep the pipe open, so the parent's id is checked too
        while child.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], 0.2)[0]:
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end this before the child has ended
        end(child)
    return child.returncode


def end(child: subprocess.Popen) -> None:
    """Ask a process to end, then kill it and everything that it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, kind)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + GRACE
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
