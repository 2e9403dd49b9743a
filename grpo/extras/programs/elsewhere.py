"""Runs programs elsewhere: on another machine or in a container, by a command that starts this file there.

    docker exec -i CONTAINER python -m grpo.extras.programs.elsewhere

It reads one job from standard input as JSON, runs it in the sandbox of that place, and writes its `Result` as JSON. It needs this
project there, and no other package.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from typing import Any, get_args

from grpo.extras.programs.sandbox import START_SECONDS, Ending, ProgramLimits, Result, UnitTests, run_program
from grpo.system.errors import UserError, one_line

Run = Callable[..., Result]  # with the parameters of `run_program`


def job_of(
    program: str,
    limits: ProgramLimits | None = None,
    unconfined: bool = False,
    tests: UnitTests | None = None,
    stdin: str | None = None,
) -> str:
    """Return the arguments of `run_program` as the JSON that this file reads."""
    job = {"program": program, "limits": asdict(limits or ProgramLimits()), "unconfined": unconfined, "stdin": stdin}
    return json.dumps(job | {"tests": None if tests is None else asdict(tests)})


def result_of(answer: str | bytes) -> Result:
    """Return the result that this file has written. Raises ValueError, TypeError or KeyError if it is none."""
    fields = json.loads(answer)
    result = Result(**fields | {"confinement": tuple(fields["confinement"])})
    texts = result.stdout, result.stderr
    if result.ending not in get_args(Ending) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the ending {result.ending!r}")
    return result


def run_by_command(command: str, program: str, limits: ProgramLimits | None = None, *more: Any, **named: Any) -> Result:
    """Run a program where `command` starts this file; see `run_program` for the others. A job without an answer is "unstarted":
    the machine did not answer in time, or the command failed, as its stderr says."""
    limits = limits or ProgramLimits()
    job = job_of(program, limits, *more, **named).encode()
    patience = 2 * START_SECONDS + 2 * limits.seconds  # its own limits end a program much earlier
    try:
        done = subprocess.run(shlex.split(command), input=job, capture_output=True, timeout=patience, check=False)
        return result_of(done.stdout)
    except subprocess.TimeoutExpired:
        return Result("unstarted", "", f"there was no answer in {patience:g} s", patience, ())
    except OSError as error:
        return Result("unstarted", "", str(error), 0.0, ())
    except (ValueError, TypeError, KeyError, RecursionError):
        answer = one_line(done.stdout.decode(errors="replace"), 200)
        said = done.stderr.decode(errors="replace").strip() or (f"it answered {answer}" if answer else "")
        return Result("unstarted", "", said, 0.0, ())


@cache
def run_in(command: str) -> Run:
    """Return what runs programs by this command, after it has run an empty one. Raises UserError if it cannot."""
    run = partial(run_by_command, command)
    result = run("", unconfined=True)
    if not result.passed:
        last = (result.stderr.strip().splitlines() or ["it answered nothing"])[-1]
        raise UserError(f"sandbox={command}: an empty program was {result.ending} there: {last}")
    return run


def answer_of(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job here, and return its result as JSON can tell."""
    tests = job["tests"] and UnitTests(**{**job["tests"], "names": tuple(job["tests"]["names"])})
    limits = ProgramLimits(**job["limits"])
    return asdict(run_program(job["program"], limits, job["unconfined"], tests, job["stdin"]))


if __name__ == "__main__":
    try:
        print(json.dumps(answer_of(json.load(sys.stdin))))
    except UserError as error:
        sys.exit(str(error))
