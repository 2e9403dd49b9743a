"""Reads the project's own files: the imports of a module, and the keys that the tables of other systems name."""

import ast
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from conftest import ROOT, compose_config
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from grpo.extras.migration.foreign import TableRow

CHOICES = {  # together they have the keys that the tables name
    "train": (
        "engine=vllm algo/kl=loss task=gsm8k",
        "task=musique algo/advantage=gdpo judge=explicit",
        "engine=vllm_server adapter=lora logger=wandb optim=adamw_8bit source=atropos task=jsonl",
    ),
    "serve": ("engine=vllm",),
}


@functools.cache
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


def table(page: str, header: str) -> list[list[str]]:
    """Return the rows of all tables of a page whose first column has this header."""
    found, inside = [], False
    for line in (ROOT / page).read_text().splitlines():
        inside = line.startswith(f"| {header} |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@functools.cache
def configs() -> list:
    return [compose_config(*chosen.split(), "output_dir=.", name=name) for name in CHOICES for chosen in CHOICES[name]]


def has(config, key: str) -> bool:
    return OmegaConf.select(config, key, default=CHOICES) is not CHOICES


def holds(word: str) -> bool:
    """Return whether a key exists, or the key and the options of KEY=VALUE. With + the parent exists and the key does not."""
    key, _, value = word.partition("=")
    if key.isupper() or key.lstrip("+").startswith(("hydra", "logger")):
        return True  # of the environment, of Hydra, of a tracker
    if key in ("train.py", "eval.py"):
        return (ROOT / key).is_file()
    if (ROOT / "conf" / key).is_dir():
        options = [] if "..." in value else re.findall(r"\w+", value)
        return all((ROOT / "conf" / key / f"{option}.yaml").is_file() for option in options)
    if key.startswith("+"):
        return any(has(config, key[1:].rpartition(".")[0]) and not has(config, key[1:]) for config in configs())
    return any(has(config, key) for config in configs())


def faults(rows: "list[TableRow]") -> list[str]:
    """Return the keys in the last two columns of the rows that do not exist, and refusals without a reason."""
    found = []
    for *_, here, remark in rows:
        found += [f"no reason: {remark}"] if here == "none" and len(remark) <= 10 else []
        words = re.findall(r"`([+~]?[\w./]+=[^`]*)`", remark)
        words += [] if here in ("always", "none") else re.findall(r"`([^`]+)`", here)
        found += [word for words in words for word in re.split(r" (?=[\w./+~]+=)", words) if not holds(word)]
    return found
