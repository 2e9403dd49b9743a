"""Writes what the file of a SkyPilot task says (docs/hardware.md)."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from grpo.system.errors import UserError

BUCKET = "/grpo-runs"  # where a bucket is mounted on the rented machine
FILES = "/tmp/grpo-files"  # where the files go that overrides name
PLACE = re.compile(r"(^|[\[{,:'\"])(\s*)([\w.~+/-]+)(?=\s*($|[\]},:'\"]))")  # a value or an item, not a word of a text
TRACKERS = ("wandb", "mlflow", "trackio")  # each needs the extra of its name


def skypilot_values(config: DictConfig, words: Sequence[str], folder: Path, project: Path) -> dict[str, Any]:
    """Return the values of launch.skypilot.jinja. words: the overrides of the run. folder: the run's on this machine. project:
    the folder that is sent. Raises UserError if one rented machine cannot run this."""
    deployment, trainer = config.deployment, config.trainer
    if trainer.num_nodes > 1 or deployment.server_nodes:
        raise UserError("--to=skypilot rents one machine: set trainer.num_nodes=1 and deployment.server_nodes=0")
    has_gpu = trainer.accelerator != "cpu"
    if has_gpu and not deployment.gpu:
        raise UserError("--to=skypilot needs deployment.gpu=NAME, as T4, A100 or H100; or trainer=cpu")
    extras = deployment.extras
    if extras is None:
        extras = [*["vllm"] * has_gpu, *(name for name in TRACKERS if name in (config.logger or ()))]
    run = f"{BUCKET}/{folder.name}" if deployment.bucket else f"outputs/launched/{folder.name}"
    mounts: dict[str, Any] = {}
    there = [with_file(word, project, mounts) for word in words]
    if deployment.bucket:
        mounts[BUCKET] = {"source": deployment.bucket, "mode": "MOUNT_CACHED"}
    same = [word for word in there if word.startswith("trainer")]
    return {
        "name": re.sub(r"[^a-z0-9]+", "-", f"grpo-{folder.name.lower()}").strip("-"),
        "project": str(project),
        "gpu": f"{deployment.gpu}:{gpus(config)}" if has_gpu else None,
        "install": f".[{','.join(extras)}]" if extras else ".",
        "secrets": sorted({name for word in words for name in re.findall(r"\$\{oc\.env:(\w+)", word)}),
        "mounts": mounts,
        "run": run,
        "trainer": ["python", "train.py", *there, "resume=auto", f"hydra.run.dir={run}"],
        "evaluation": ["python", "eval.py", f"run={run}", "trust=true", *same, f"hydra.run.dir={run}/evaluation"],
    }


def gpus(config: DictConfig) -> int:
    """Return how many GPUs a run needs on its machine: those of the trainer, and those that its servers name."""
    named = config.engine.get("devices")
    servers = [int(number) for number in re.findall(r"\d+", str(named))] if isinstance(named, ListConfig) else []
    return max(config.trainer.devices, *(number + 1 for number in servers), 1)


def with_file(word: str, project: Path, mounts: dict[str, Any]) -> str:
    """Return an override as the rented machine gets it. A file or folder of this machine that it names is sent with the project,
    or, if it is not part of that, noted in `mounts`, from its place there to its place here."""

    def place(match: re.Match) -> str:
        before, named = match[1] + match[2], match[3]
        here = Path(named).expanduser()
        if not here.name or not ("/" in named or here.suffix) or not here.exists():
            return match[0]
        here = here.resolve()
        if here.is_relative_to(project) and not ignored(here, project):
            return before + str(here.relative_to(project))
        there = f"{FILES}/{len(mounts)}/{here.name}"
        mounts[there] = str(here)
        return before + there

    key, equals, value = word.partition("=")
    return key + equals + PLACE.sub(place, value)


def ignored(file: Path, project: Path) -> bool:
    """Return whether git ignores a file. SkyPilot does not send such files with the project."""
    return subprocess.run(["git", "check-ignore", "-q", str(file)], cwd=project, check=False).returncode == 0
