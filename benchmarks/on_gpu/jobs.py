"""Runs jobs, each in a process with a time limit, and keeps what they measured. Imports neither torch nor the project.

A job prints a line for each thing as soon as it is measured, so a job that is killed keeps what came before.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

MARK = "measured: "  # the beginning of a line that a job prints
LEAST = 20.0  # seconds without which no job is started


class Skipped(Exception):
    """Raised by a job that cannot be done here: it is no failure."""


@dataclass(frozen=True)
class Job:
    """The work of one process: a part, its variant, and the name of a shape."""

    part: str
    variant: str
    shape: str


def note(**values) -> None:
    """Print measured values for `run`."""
    print(MARK + json.dumps(values), flush=True)


def results(
    jobs: Sequence[Job], command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Iterator[dict]:
    """Yield a result for each job, in order. command: to it the job's words are added. seconds: for all jobs together."""
    ends = time.monotonic() + seconds
    for job in jobs:
        left = ends - time.monotonic()
        if left < LEAST:
            yield result(job, "skipped", "no time was left: raise --minutes")
            continue
        words = [job.part, job.variant, job.shape]
        yield run(job, [*command, *words], share_of(left), environment)


def share_of(left: float) -> float:
    """Return the limit of the next job in seconds: a quarter of what is left, at least 90, so that a few that hang leave time."""
    return min(left, max(90.0, left / 4))


def run(job: Job, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> dict:
    """Run a job to its end, or to its time limit, and return its result."""
    begun, why = time.monotonic(), ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = {"stdout": out, "stderr": err, "env": environment}
        process = subprocess.Popen(command, start_new_session=True, **streams)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            why = f"it was ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()
        said, wrong = [stream.seek(0) or stream.read().splitlines() for stream in (out, err)]
    values: dict = {}
    for line in said:
        if line.startswith(MARK):
            values |= json.loads(line.removeprefix(MARK))
    if "skipped" in values:
        return result(job, "skipped", values.pop("skipped"), values)
    if process.returncode and not why:
        why = next((line for line in reversed(wrong) if line.strip()), f"it ended with {process.returncode}")
    return result(job, "failed" if why else "ok", why, values, time.monotonic() - begun)


def result(job: Job, status: str, why: str, values: Mapping | None = None, seconds: float = 0.0) -> dict:
    """Return a result. status: ok, failed or skipped. why: one line, unless it is ok."""
    return {
        **vars(job),
        "status": status,
        "why": " ".join(why.split())[:300],
        "seconds": seconds,
        "values": dict(values or {}),
    }


def sorted_by(order: Sequence[Job], jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs in this order; those that it lacks come last, as they are."""
    places = {job: i for i, job in enumerate(order)}
    return sorted(jobs, key=lambda job: places.get(job, len(places)))
