"""Starts a run elsewhere: one Slurm job, lines for torchrun, services of docker compose, or a machine that SkyPilot rents. See
docs/hardware.md.

python -m grpo.launch [--dry-run] [--to=slurm|torchrun|compose|skypilot] OVERRIDES...

OVERRIDES are those of train.py; the group `deployment` says where the trainer and its vLLM servers run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import DictConfig, OmegaConf

from grpo.apps.cli import one_line_errors
from grpo.config.composing import composed
from grpo.config.validation import check_values
from grpo.extras.launch.skypilot import skypilot_values
from grpo.system.errors import UserError
from grpo.system.output.secrets import learn, masked_argument
from grpo.system.root import ROOT

TEMPLATES = Path(__file__).parent
KINDS = ("slurm", "torchrun", "compose", "skypilot")
FOLDER = "hydra.run.dir="
SERVER = "vllm.entrypoints.openai.api_server"
LOADING = 900  # seconds that the trainer waits for servers, which load the model meanwhile


def main(arguments: Sequence[str]) -> None:
    """Print the file of a command line; for Slurm without --dry-run, write it into the run's folder and submit it."""
    flags = [word for word in arguments if word.startswith("-")]
    kind = next((flag.removeprefix("--to=") for flag in flags if flag.startswith("--to=")), "slurm")
    if {"-h", "--help"} & {*flags}:
        print(__doc__)
        return
    if wrong := [flag for flag in flags if flag != "--dry-run" and not flag.startswith("--to=")]:
        raise UserError(f"{wrong[0]} is no flag: grpo.launch takes --dry-run and --to=KIND, then overrides of train.py")
    if kind not in KINDS:
        raise UserError(f"--to={kind} must be one of {', '.join(KINDS)}")
    overrides = [word for word in arguments if word not in flags]
    folder = shared_folder(overrides)
    text = launch_file(kind, overrides, folder)
    if kind != "slurm" or "--dry-run" in flags:
        print(text)
        return
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here: run this where Slurm is; --dry-run prints the file")
    (folder / "launch").mkdir(parents=True, exist_ok=True)  # Slurm does not make the folder of its logs
    file = folder / "launch" / "job.sbatch"
    file.write_text(text, encoding="utf-8")
    sys.exit(subprocess.run(["sbatch", str(file)]).returncode)


def shared_folder(overrides: Sequence[str]) -> Path:
    """Return the run's folder, the same on every machine. Raises UserError if its name would differ, or break a file."""
    folders = [word.removeprefix(FOLDER) for word in overrides if word.startswith(FOLDER)]
    name = folders[-1] if folders else f"outputs/launched/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if not re.fullmatch(r"[\w./+-]+", str(Path(name).resolve())):
        raise UserError(f"{FOLDER}{name}: take a path of letters, digits and _ . / + - that is the same everywhere")
    return Path(name).resolve()


def launch_file(kind: str, overrides: Sequence[str], folder: Path) -> str:
    """Return the text of a launch file: an sbatch file, lines for torchrun, a docker-compose.yaml or a SkyPilot task. Raises
    UserError."""
    learn([])
    for word in overrides:
        if masked_argument(plain := re.sub(r"\$\{oc\.env:\w+\}", "", word)) != plain:
            key = word.partition("=")[0]
            raise UserError(f"{key} holds a secret, which a launch file would show: set it as {key}='${{oc.env:NAME}}'")
    config = composed("train", [*overrides, f"output_dir={folder}"])
    check_values(config)
    check_deployment(config, kind)
    deployment, trainer = OmegaConf.to_container(config.deployment), config.trainer
    ours = [FOLDER, "resume=", *["engine.urls="] * bool(deployment["server_nodes"])]  # the file has its own
    words = [word for word in overrides if not word.startswith(tuple(ours))]
    if kind == "skypilot":
        rented = skypilot_values(config, words, folder, ROOT)
        return filled(kind, deployment | {"folder": str(folder)} | rented)
    words += ["resume=auto", f"{FOLDER}{folder}"]
    environment, flags = server_command(config) if config.deployment.server_nodes else ({}, [])
    if flags and not any(word.startswith("engine.wait=") for word in overrides):
        words.append(f"engine.wait={LOADING}")
    python = "python" if deployment["setup"] or kind == "compose" else sys.executable
    start = ["train.py"] if kind == "torchrun" else [python, "train.py"]
    values = deployment | {"trainer_nodes": trainer.num_nodes, "devices": trainer.devices, "folder": str(folder)}
    values |= {"gpus": trainer.accelerator != "cpu", "root": shlex.quote(str(ROOT)), "trainer": [*start, *words]}
    values |= {"environment": environment, "server": [python, "-m", SERVER, *flags], "python": python}
    return filled(kind, values)


def filled(kind: str, values: Mapping[str, Any]) -> str:
    """Return the template of a kind with these values."""
    templates = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters["shell"] = shlex.join
    return templates.get_template(f"launch.{kind}.jinja").render(values)


def check_deployment(config: DictConfig, kind: str) -> None:
    """Raises UserError if trainer, engine and deployment do not fit each other."""
    nodes, remote = config.deployment.server_nodes, "urls" in config.engine
    if nodes and not remote:
        raise UserError(f"deployment.server_nodes={nodes} starts servers: set engine=vllm_server, or server_nodes=0")
    if remote and not nodes and not config.engine.launch and not config.engine.urls:
        raise UserError("engine=vllm_server has no servers: set deployment.server_nodes, or engine.urls")
    if nodes and not isinstance(config.engine.path, str):
        raise UserError("vLLM servers elsewhere need model.path=FOLDER_OR_HUB_ID: this model is made by the trainer")
    if kind == "compose" and config.trainer.num_nodes + nodes > 1 + bool(nodes):
        raise UserError("--to=compose is for one machine: set trainer.num_nodes=1, and deployment.server_nodes=0 or 1")
    if kind == "compose" and remote and "nccl" in config.engine.sync:
        raise UserError(f"engine.sync={config.engine.sync} needs one network of GPUs: set engine.sync=disk")
    if kind == "compose" and not config.deployment.image:
        raise UserError("--to=compose needs deployment.image=IMAGE, with this project in its working directory")


def server_command(config: DictConfig) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a vLLM server and its flags, all but its address."""
    from grpo.extras.vllm_server.launch import command  # imports torch

    values = OmegaConf.to_container(config.engine.args, resolve=True)
    args = {name: value for name, value in values.items() if value is not None}
    args["tensor_parallel_size"] = config.deployment.server_devices
    return command(config.engine.path, config.engine.sync, args)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with one_line_errors("train"):
        main(sys.argv[1:])
