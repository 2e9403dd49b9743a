"""Runs an untrusted Python program in a process of its own and returns how it ended, as a `Result`.

The process itself is in `sandbox_child`; this file watches it. `run_program` may be called from many threads at once: the
child is started without running Python between fork and exec, and no state is shared.

"passed" means that the tests ran to their last line, in a second process that never runs the program (`tester`). The program is
then a module that they import: it is not `__main__`, and may call sys.exit after its definitions. With `stdin` it is a script,
and "passed" means that it ended by itself; whoever called compares what it printed. With neither, it must run to its last line,
which a hostile program can forge. os._exit never passes.
"""

import contextlib
import math
import os
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
from typing import IO, Annotated, Literal

from grpo.extras.programs import exchange, sandbox_child, tester  # noqa: F401 - the child uses the bytecode of all
from grpo.system.clock import Clock
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Range, Seconds, Whole, enforced

Ending = Literal["passed", "failed", "timeout", "memory", "disk", "unstarted", "untestable"]
# failed: an exception, a signal, or an early exit; unstarted: the machine never reached the program's first line; untestable: the
# tests pass something to the program that can be neither copied nor lent

START_SECONDS = 60  # for the child to get ready on a busy machine; the program's own time starts afterwards
LOOK_EVERY = 0.05  # seconds between checks of the folder; a program can write some hundred MB in between
MAX_ENTRIES = 1000  # files and folders
_LAUNCHER = str(Path(sandbox_child.__file__).resolve())
# importing them uses the bytecode that this process has left
_LAUNCH = """import sys
sys.path.insert(0, sys.argv.pop(1).rpartition("/")[0])
import exchange, tester, sandbox_child
del sys.path[0]
sandbox_child.main()"""


@enforced("limits")
@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program. It cannot start processes, so none can outlive it."""

    seconds: Seconds = 10.0  # from the program's first line, without those in which it waits for a core
    memory_mb: Annotated[int, Range(64)] = 512  # of address space; the bare interpreter takes about 30
    disk_mb: Count = 16  # for each file and standard output, and for all files in its folder together
    threads: Count = 16
    output: Whole = 4096  # bytes kept from the end of standard output, and of standard error


@dataclass(frozen=True)
class UnitTests:
    """Code of the dataset. It runs in the tester's process, where `names` are the program's functions.

    setup runs before the names are bound, code afterwards.
    """

    code: str = ""
    names: tuple[str, ...] = ()
    setup: str = ""


@dataclass(frozen=True)
class Result:
    """The outcome of a program: how it ended, and its output."""

    ending: Ending
    stdout: str  # the last `ProgramLimits.output` bytes
    stderr: str
    seconds: float  # total, with start and clean-up
    confinement: tuple[str, ...]  # measures in force; with ("limits",) alone it could access all that its user can

    @property
    def passed(self) -> bool:
        """Whether the program and its tests ran to their last line."""
        return self.ending == "passed"


def run_program(
    program: str,
    limits: ProgramLimits | None = None,
    unconfined: bool = False,
    tests: UnitTests | None = None,
    stdin: str | None = None,
) -> Result:
    """Run the program in an empty folder, deleted afterwards, without environment, network or other processes, and its tests in a
    process of their own. stdin: the text on its standard input, as a script; None: no input.

    Raises UserError if the platform cannot confine it (not Linux, or no Landlock), unless `unconfined` accepts limits of time,
    memory and file size alone; a process that the program started and moved out of its group then survives it.
    """
    limits = limits or ProgramLimits()
    name, may_exit = "__main__" if tests is None else "program", tests is not None or stdin is not None
    tests = tests or UnitTests()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
        stack.callback(_remove, folder)
        job, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        text = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # where a program may open /dev/stdin
        text.write((stdin or "").encode(errors="surrogatepass"))
        job.write(exchange.encode((program, name, may_exit, tests.setup, list(tests.names), tests.code)))
        for file in (text, job):
            file.seek(0)
        files = {"stdin": text, "stdout": stdout, "stderr": stderr}
        reader, status = os.pipe()
        stack.callback(os.close, reader)
        try:
            process = _start(folder, (status, job.fileno()), limits, unconfined, **files)
        finally:
            os.close(status)
        try:
            exceeded, report = _watch(process, reader, folder, limits)
        finally:
            _kill(process, group=unconfined)
        first, started, last = report.partition(sandbox_child.MARK)
        _check_confined(first)
        ending = exceeded or last.decode() or "failed"
        if not started:
            ending = "unstarted"
        elif exceeded is None and process.returncode == -signal.SIGXCPU:
            ending = "timeout"
        out, err = _tail(stdout, limits.output), _tail(stderr, limits.output)
    confinement = tuple(first.decode(errors="replace").split(", ")) if started else ()
    seconds = time.monotonic() - began
    return Result(ending, out, err, seconds, confinement)


def _check_confined(line: bytes) -> None:
    """Raise UserError if the child's first line says that it could not confine itself."""
    if line.startswith(sandbox_child.REFUSED):
        reason = line.removeprefix(sandbox_child.REFUSED).decode(errors="replace")
        fix = "use Linux with Landlock, in a container that permits it, or accept limits of time, memory and file size alone"
        raise UserError(f"a program cannot be confined here ({reason}): {fix} with unconfined=True")


@cache
def confinement() -> tuple[str, ...]:
    """Return the measures that confine a program here, found by running one. Raises UserError if `run_program` does."""
    return run_program("").confinement


def _start(
    folder: str, passed: tuple[int, int], limits: ProgramLimits, unconfined: bool, **files: IO
) -> subprocess.Popen:
    amounts = limits.memory_mb, limits.disk_mb, limits.threads, float(limits.seconds)
    numbers = *passed, int(unconfined), os.getpid(), *amounts
    python = getattr(sys, "_base_executable", None) or sys.executable
    # -s -S -P -B: no site-packages, no other folder to import from, no bytecode written; the environment is ours
    interpreter = "-sSPB", "-c", _LAUNCH
    return subprocess.Popen(
        [python, *interpreter, _LAUNCHER, folder, *map(str, numbers)],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # the order of a set, and thus a verdict, is always the same
        },
        pass_fds=passed,
        start_new_session=True,
        **files,
    )


def _watch(
    process: subprocess.Popen, reader: int, folder: str, limits: ProgramLimits
) -> tuple[Literal["timeout", "disk"] | None, bytes]:
    """Wait for the end. Returns the limit that was exceeded, or None, and what the child has reported through the pipe."""
    report, started, clock, limit = b"", False, Clock(process.pid), START_SECONDS
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while True:
        # checked first: the report is then complete, and in time however late we look
        if process.poll() is not None:
            return None, report + (os.read(reader, 4096) if poll.poll(0) else b"")
        wait = min(limit - clock.spent(), LOOK_EVERY)
        if wait <= 0:
            return "timeout", report
        if _exceeds(folder, limits.disk_mb << 20):
            return "disk", report
        # returns at once when the tester has closed the pipe, which it does at its end
        if poll.poll(math.ceil(wait * 1000)):
            report = (report + os.read(reader, 4096))[:4096]
            if not started and sandbox_child.MARK in report:
                clock, limit, started = Clock(process.pid, *children(process.pid)), limits.seconds, True


def _exceeds(folder: str, limit: int) -> bool:
    """Return whether the folder holds more bytes than the limit, too many files, or something unreadable."""
    total = entries = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as contents:
                for entry in contents:
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
    """Kill the process and wait for it. group: kill what is left of its group even if it has ended, although its id may be
    another's by then.

    The tester first gets the time to end its candidate, which would stay behind as a zombie if no process adopts orphans.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            process.terminate()
            process.wait(1)
    if process.returncode is None or group:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(file: IO, size: int) -> str:
    end = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, max(0, end - size)).decode(errors="replace")


def _remove(folder: str) -> None:
    """Remove the folder, even if its folders are nested too deep for Python or closed to their owner."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([*command, folder], **quiet, check=False)


def children(process: int) -> list[int]:
    """Return the processes that this one has started and that have not ended; none if the system does not report them."""
    try:
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    except OSError:
        return []
