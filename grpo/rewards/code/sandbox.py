"""Runs a Python program that nobody trusts, in a process of its own, and says how it ended. Text in, `Result` out.

The process itself is in `sandbox_child`; here is what watches it. `run_program` may be called from many threads at once: the
child is made without running Python between fork and exec, and no state is shared.

"passed" means that the program's text ran to its last line: only then does the child write a secret, fresh for each run,
to a pipe. Leaving early, by sys.exit(0) or os._exit(0), is not passing. Not defended against: a program that digs the
secret out of its own process's memory (no Python object holds it, but whoever knows this source finds it with ctypes), and
one that empties its tests (an `__eq__` that says yes to everything, a trace function that jumps over lines). Neither gets
anything beyond that one verdict.
"""

import contextlib
import math
import os
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from grpo.rewards.code import sandbox_child
from grpo.system.errors import UserError

Ending = Literal["passed", "failed", "timeout", "memory", "disk", "unstarted"]
# failed: an exception, a signal, or an early exit; unstarted: the machine never got to the program's first line

START_SECONDS = 60  # for the child to get ready on a busy machine; the program's own time starts afterwards
LOOK_EVERY = 0.05  # seconds between looks at the folder; a program can write some hundred MB in between
MAX_ENTRIES = 1000  # files and folders
_LAUNCHER = str(Path(sandbox_child.__file__).resolve())


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program. There are no new processes at all, so none can outlive it."""

    seconds: float = 10.0  # of wall clock, from the program's first line
    memory_mb: int = 512  # of address space; the bare interpreter takes about 30
    disk_mb: int = 16  # per file, standard output among them, and for all files in its folder
    threads: int = 16
    output: int = 4096  # bytes kept of the end of standard output, and as much of standard error

    def __post_init__(self):
        counts = self.memory_mb >= 64 and self.disk_mb >= 1 and self.threads >= 1 and self.output >= 0
        if not (counts and 0 < self.seconds < math.inf):
            raise UserError(f"{self}: seconds > 0 and finite, memory_mb >= 64, disk_mb and threads >= 1, output >= 0")


@dataclass(frozen=True)
class Result:
    ending: Ending
    status: int  # of the process; minus the signal that ended it
    stdout: str  # the last `ProgramLimits.output` bytes
    stderr: str
    seconds: float  # the whole of it, start and clean-up included
    confinement: tuple[str, ...]  # what was in force; with ("limits",) alone it could touch all that its user can

    @property
    def passed(self) -> bool:
        return self.ending == "passed"


def run_program(program: str, limits: ProgramLimits | None = None, unconfined: bool = False) -> Result:
    """Runs the program in an empty folder that is gone afterwards, without input, environment, network or other processes.

    Raises UserError where the platform cannot confine it (not Linux, or no Landlock), unless `unconfined` accepts limits of
    time, memory and file size alone; then a process that the program started and moved out of its group survives it.
    """
    limits = limits or ProgramLimits()
    began = time.monotonic()
    token = secrets.token_bytes(sandbox_child.SECRET_BYTES)
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
        stack.callback(_remove, folder)
        stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(token + program.encode(errors="surrogatepass"))
        stdin.seek(0)
        heard, status = os.pipe()
        stack.callback(os.close, heard)
        try:
            process = _start(folder, status, limits, unconfined, stdin=stdin, stdout=stdout, stderr=stderr)
        finally:
            os.close(status)
        try:
            ending, said = _watch(process, heard, folder, limits)
        finally:
            _kill(process, group=unconfined)
        first, started, last = said.partition(sandbox_child.MARK)
        if first.startswith(sandbox_child.REFUSED):
            reason = first.removeprefix(sandbox_child.REFUSED).decode(errors="replace")
            raise UserError(
                f"a program cannot be confined here ({reason}): use Linux with Landlock, in a container that permits it, "
                "or accept limits of time, memory and file size alone with unconfined=True"
            )
        if not started:
            ending = "unstarted"
        elif ending is None and process.returncode == -signal.SIGXCPU:
            ending = "timeout"
        elif ending is None:
            ending = {token: "passed", sandbox_child.OUT_OF_MEMORY: "memory"}.get(last, "failed")
        out, err = _tail(stdout, limits.output), _tail(stderr, limits.output)
    confinement = tuple(first.decode(errors="replace").split(", ")) if started else ()
    return Result(ending, process.returncode, out, err, time.monotonic() - began, confinement)


@cache
def confinement() -> tuple[str, ...]:
    """The measures that confine a program here, found by running one. Raises UserError where `run_program` would."""
    return run_program("").confinement


def _start(folder: str, status: int, limits: ProgramLimits, unconfined: bool, **files: IO) -> subprocess.Popen:
    amounts = limits.memory_mb, limits.disk_mb, limits.threads, float(limits.seconds)
    numbers = status, int(unconfined), os.getpid(), *amounts
    return subprocess.Popen(
        # -s -S -P -B: no site-packages, no other folder to import from, no bytecode written; the environment is ours
        [getattr(sys, "_base_executable", None) or sys.executable, "-sSPB", _LAUNCHER, folder, *map(str, numbers)],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # a set's order, and with it a verdict, is the same every time
        },
        pass_fds=(status,),
        start_new_session=True,
        **files,
    )


def _watch(process: subprocess.Popen, heard: int, folder: str, limits: ProgramLimits) -> tuple[Ending | None, bytes]:
    """Waits for the end, which may be ours: ("timeout", ...) or ("disk", ...). Also what the child said on its pipe."""
    said, listening = b"", True
    deadline, started = time.monotonic() + START_SECONDS, False
    poll = select.poll()
    poll.register(heard, select.POLLIN)
    while True:
        if process.poll() is not None:  # asked first: what it said is complete now, and in time however late we look
            return None, said + (os.read(heard, 4096) if poll.poll(0) else b"")
        wait = min(deadline - time.monotonic(), LOOK_EVERY)
        if wait <= 0:
            return "timeout", said
        if _exceeds(folder, limits.disk_mb << 20):
            return "disk", said
        if not listening:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
        elif poll.poll(math.ceil(wait * 1000)):
            chunk = os.read(heard, 4096)
            listening = bool(chunk)
            said = (said + chunk)[:4096]
            if not started and sandbox_child.MARK in said:
                deadline, started = time.monotonic() + limits.seconds, True


def _exceeds(folder: str, limit: int) -> bool:
    """Whether the folder holds more bytes than the limit, too many files, or something we may not look at."""
    total = entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    facts = entry.stat(follow_symlinks=False)
                    total += facts.st_blocks * 512
                    entries += 1
                    if total > limit or entries > MAX_ENTRIES:
                        return True
                    if stat.S_ISDIR(facts.st_mode):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _kill(process: subprocess.Popen, group: bool) -> None:
    """Ends the process and waits for it. Once it was waited for, its number may be another's: then only if `group` says so."""
    if process.returncode is None or group:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(file: IO, size: int) -> str:
    end = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, max(0, end - size)).decode(errors="replace")


def _remove(folder: str) -> None:
    """Removes the folder, also one whose folders are nested too deep for Python or closed to their owner."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
