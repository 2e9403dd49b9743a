"""Runs the jobs of a sweep in parallel, each in its own process. Jobs that finished earlier are not run again.

This module knows commands and the files of a run. It does not know Hydra, whose launcher in `hydra_plugins/grpo.py` uses it.
"""

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.table import Table
from rich.text import Text

from grpo.extras.network import child
from grpo.extras.sweep.jobs import EARLY, Job
from grpo.system.errors import UserError, plural
from grpo.system.files import write_text
from grpo.system.metrics import percent
from grpo.system.output.console import busy, console
from grpo.system.output.secrets import masked_argument

POLL = 0.2  # seconds between two checks of the jobs

SWEEPS: list["Sweep"] = []  # of this process, for `reported`: a sweeper does not report how its jobs ended


def places(jobs: int | str, devices: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment variables for each of the jobs that run at the same time: a device, or a share of the cores.

    jobs: number of jobs at the same time; auto is one for each device, and one without devices.
    devices: names for CUDA_VISIBLE_DEVICES.
    environment: the current variables; a given OMP_NUM_THREADS is kept.
    """
    if jobs == "auto":
        jobs = max(1, len(devices))
    if not isinstance(jobs, int) or jobs < 1:
        raise UserError(f"hydra.launcher.jobs={jobs} must be auto or an integer of at least 1")
    if devices:
        return [{"CUDA_VISIBLE_DEVICES": devices[i % len(devices)]} for i in range(jobs)]
    if jobs == 1 or "OMP_NUM_THREADS" in environment:
        return [{}] * jobs
    return [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}] * jobs


def is_behind(own: Mapping[int, float], others: Sequence[Mapping[int, float]], fewest: int) -> bool:
    """Return whether the last accuracy of a run is below the median of those that at least `fewest` others had after as many
    rollouts (the median rule of Golovin et al. 2017, Vizier). own, others: accuracies by rollouts; that of 0 does not count."""
    at = max(own, default=0)
    there = [curve[at] for curve in others if at in curve]
    return at > 0 and len(there) >= fewest and own[at] < median(there)


class Sweep:
    """The jobs of a sweep in one folder. Mutable: jobs are added and run, several times if a sweeper chooses them in steps.

    command: returns the command that starts a job with these overrides.
    places: environment variables for each job that runs at the same time, from `places`.
    again: the command line that resumes the sweep, for messages.
    planned: the number of jobs, if a sweeper adds them in steps.
    prune: stop a job that `is_behind` so many finished ones; None: none.

    Raises UserError if another sweep is running in the folder.
    """

    def __init__(
        self,
        folder: Path,
        command: Callable[[Job, Sequence[str]], Sequence[str]],
        places: Sequence[Mapping[str, str]],
        again: str,
        planned: int = 0,
        prune: int | None = None,
    ) -> None:
        self.folder, self.command, self.places, self.again = folder, command, places, again
        self.planned, self.prune = planned, prune
        self.jobs: list[Job] = []
        self.began = False
        self.console = console(highlight=False, markup=False, soft_wrap=True)
        self.record = folder / "jobs.json"  # the overrides of each job, in the order of their numbers
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = (folder / ".lock").open("a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            line = f"another sweep or its last jobs are still running in {folder}: wait, or set hydra.sweep.dir"
            raise UserError(line) from None
        SWEEPS.append(self)

    def numbered(self) -> list[list[str]]:
        """Return the overrides of all jobs that this folder has numbered, in order."""
        return json.loads(self.record.read_text(encoding="utf-8")) if self.record.exists() else []

    def number(self, overrides: Sequence[str]) -> int:
        """Return the number of the job with these overrides: the number that it had before, or a new one."""
        jobs, overrides = self.numbered(), list(map(masked_argument, overrides))
        for number, job in enumerate(jobs):
            if sorted(job) == sorted(overrides):
                return number
        self.write([*jobs, overrides])
        return len(jobs)

    def write(self, jobs: Sequence[Sequence[str]]) -> None:
        """Write the overrides of all numbered jobs."""
        lines = [json.dumps(job, ensure_ascii=False) for job in jobs]
        write_text(self.record, "[\n" + ",\n".join(lines) + "\n]\n")

    def forget(self, before: Sequence[Sequence[str]]) -> None:
        """Drop the jobs that were added before any of them began. before: those numbered earlier. A new folder is removed."""
        if self.began:
            return
        self.jobs.clear()
        if before:
            self.write(before)
        elif {path.name for path in self.folder.iterdir()} <= {".lock", "jobs.json", "multirun.yaml"}:
            shutil.rmtree(self.folder)

    def add(self, job: Job) -> Job:
        """Add a job and return it. If a job with its number exists, return that one instead."""
        if earlier := next((other for other in self.jobs if other.number == job.number), None):
            return earlier
        if job.manifest.get("status") == "finished":
            job.status = "finished"
        elif job.mark.exists():
            job.status = EARLY
        self.jobs.append(job)
        return job

    def run(self) -> None:
        """Run all waiting jobs and return when they have ended. A failed job does not stop the others."""
        waiting = deque(job for job in self.jobs if job.status == "waiting")
        done = len(self.jobs) - len(waiting)
        if not self.began:
            self.began = True
            before = f", {done} of them finished before" if done else ""
            at_once = f"{len(self.places)} at a time, in {self.folder}"
            self.console.print(f"sweep of {plural(self.count, 'job')}{before}, {at_once}")
            self.console.print(f"to resume it after an interruption: {self.again}")
        free = list(reversed(self.places))
        running: dict[Job, tuple[subprocess.Popen, Mapping[str, str]]] = {}
        with sigterm_raises(), busy("jobs of the sweep", self.count - done) as step:
            try:
                while waiting or running:
                    while waiting and free:
                        job, place = waiting.popleft(), free.pop()
                        running[job] = self.start(job, place), place
                    for job, (process, place) in list(running.items()):
                        if (code := process.poll()) is not None:
                            del running[job]
                            free.append(place)
                            self.end(job, code)
                            step()
                        elif self.falls_behind(job):
                            job.mark.touch()
                            process.stdin.close()  # its guard asks it to end
                    time.sleep(POLL)
            except (KeyboardInterrupt, SystemExit):
                self.console.print(f"stopped; to resume: {self.again}")
                raise
            finally:
                child.stop(process for process, _ in running.values())

    def start(self, job: Job, place: Mapping[str, str]) -> subprocess.Popen:
        """Start the process of a job. place: its environment variables."""
        command = self.command(job, job.arguments())
        job.folder.mkdir(parents=True, exist_ok=True)
        job.status = "running"
        self.console.print(f"job {job.number} begins: {job.label}")
        with job.output.open("ab", buffering=0) as output:
            variables = [f"{name}={value}" for name, value in place.items()]
            output.write(f"$ {masked_argument(shlex.join([*variables, *command]))}\n".encode())
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **place}
            # The child's guard process holds the lock, too: after a kill no other sweep starts here until its jobs have ended.
            return child.start(command, env=environment, stdout=output, stderr=output, pass_fds=[self.lock.fileno()])

    def falls_behind(self, job: Job) -> bool:
        """Return whether a job that runs should be stopped: it has more to learn, and is behind the finished ones."""
        if self.prune is None or job.mark.exists() or max(curve := job.curve, default=0) >= (job.rollouts or 0):
            return False
        return is_behind(curve, [other.curve for other in self.jobs if other.status == "finished"], self.prune)

    def end(self, job: Job, code: int) -> None:
        """Set the status of a job whose process has ended, and print a line. code: the exit status."""
        job.status = "finished" if not code else EARLY if job.mark.exists() else "failed"
        code = job.status == "failed"
        outcome = f"{job.last_words()} ({job.output})" if code else f"accuracy {percent(job.accuracy)}"
        self.console.print(f"job {job.number} {job.status}: {job.label}: {outcome}; {self.total()}")

    @property
    def count(self) -> int:
        """The number of jobs, also of those that will be chosen later."""
        return max(self.planned, len(self.jobs))

    def total(self) -> str:
        """Return a line with the number of jobs by status."""
        count = Counter(job.status for job in self.jobs)
        counts = [f"{count['finished']}/{self.count} done"]
        counts += [f"{count[status]} {status}" for status in (EARLY, "failed", "running") if count[status]]
        return ", ".join(counts)

    def report(self) -> None:
        """Write report.html for the training runs of the sweep. A failure is printed, not raised."""
        if not any(job.status == "finished" and job.rollouts is not None for job in self.jobs):
            return
        from grpo.extras.report import write_report  # slow imports
        from grpo.extras.report.comparison import comparable
        from grpo.extras.report.runs import load

        try:
            page = write_report(self.folder)
            arms = len(comparable(load(self.folder)))  # runs without callbacks.samples cannot be compared
            table = f"; as a table: python eval.py compare={self.folder}" if arms > 1 else ""
            self.console.print(f"written to {page}{table}")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.console.print(f"no report.html ({reason}); to retry: python -m grpo.report {self.folder}")

    def table(self) -> Table:
        """Return a table with a row for each job: overrides, status, accuracy, minutes."""
        table = Table("job", "overrides", "status", "accuracy", "minutes", title=f"sweep in {self.folder}")
        for job in sorted(self.jobs, key=lambda job: job.number):
            minutes = "-" if job.minutes is None else f"{job.minutes:.1f}"
            table.add_row(*map(Text, (str(job.number), job.label, job.status, percent(job.accuracy), minutes)))
        return table


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit during a `with` block, so that `finally` blocks run, as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reported() -> Iterator[None]:
    """Print the table of jobs and write the report after a `with` block that may run sweeps. Raises UserError if jobs failed."""
    failure = None
    try:
        yield
    except Exception as error:  # some sweepers raise if no job succeeded
        failure = error
    jobs = [job for sweep in SWEEPS for job in sweep.jobs]
    for sweep in SWEEPS:
        if sweep.jobs:
            sweep.console.print(sweep.table())
            sweep.report()
    if failed := [f"{job.number} ({job.output})" for job in jobs if job.status == "failed"]:
        raise UserError(
            f"{len(failed)} of the sweep's {plural(len(jobs), 'job')} failed: {', '.join(failed)}"
        ) from failure
    if failure:
        raise failure
