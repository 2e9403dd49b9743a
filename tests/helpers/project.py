"""Reads the tables that map settings of other systems to keys of ours, and tries the keys."""

import ast
import functools
import re
from pathlib import Path

from conftest import ROOT, compose_config
from omegaconf import OmegaConf

ENGINES = ("vllm", "vllm_server", "transformers")  # a key of an engine is a key of one of these
CHOICES = {  # for the keys of these programs
    "train": ("task=gsm8k", "task=jsonl adapter=lora logger=wandb", "optim=adamw_8bit source=atropos"),
    "serve": ("",),
}


def table(page: str, header: str) -> list[list[str]]:
    """Return the rows of all tables of a page of docs/ whose first column has this header."""
    found, inside = [], False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        inside = line.startswith(f"| {header} |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@functools.cache
def configs() -> list:
    engines = [(f"engine={engine}", "algo/kl=loss") for engine in ENGINES]
    return [
        compose_config(*engine[: 1 if name == "serve" else 2], *chosen.split(), "output_dir=.", name=name)
        for name, choices in CHOICES.items()
        for i, chosen in enumerate(choices)
        for engine in (engines if i == 0 else engines[:1])
    ]


def check_keys(here: str, remark: str) -> None:
    """Fail unless every key and every KEY=VALUE of a row exists. Rows with always or none have no key."""
    assert here != "none" or len(remark) > 10
    in_remark = re.findall(r"`([+~]?[\w./]+=[^`]*)`", remark)
    for word in ([] if here in ("always", "none") else re.findall(r"`([^`]+)`", here)) + in_remark:
        key, assigned, _ = word.partition("=")
        if key in ("train.py", "eval.py"):
            assert (ROOT / key).is_file()
        elif key.isupper():
            continue  # a variable of the environment
        elif assigned and "..." not in word:
            needed = ["engine=vllm"] if "engine.args" in key else ["adapter=lora"] if "adapter." in key else []
            compose_config("output_dir=.", *needed, word)
        elif not (ROOT / "conf" / key).is_dir() and not key.lstrip("+").startswith(("hydra", "logger")):
            assert any(OmegaConf.select(config, key, default=CHOICES) is not CHOICES for config in configs()), key


def imports(file: Path) -> set[str]:
    """Return the dotted names of all modules that the file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names
