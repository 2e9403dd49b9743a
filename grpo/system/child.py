"""A process that does not outlive the one that wanted it. Imports the standard library alone.

Between the two stands a small process, this file as a command: it holds a pipe from the one that wants, and ends the other's
whole process group when the pipe closes, for whatever reason.
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
    """The guard of a command, which ends when the command does, with its exit code. options: of Popen, for both."""
    guarded = [sys.executable, "-P", __file__, *command]  # -P: the modules of this folder are no top-level ones
    # a session of its own: Ctrl-C is for whoever started it
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
        # the pipe may live on in a fork of the parent, so its id is looked at too
        while child.poll() is None and os.getppid() == parent:
            if select.select([sys.stdin], [], [], 0.2)[0]:
                break
    finally:
        end(child)
    return child.returncode


def end(child: subprocess.Popen) -> None:
    """First asked, then killed, with all that it started."""
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
