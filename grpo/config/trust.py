"""Asks before code runs that only the configuration of a run's folder names, and not this command line. See docs/run.md."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo.config.composing import CONF
from grpo.system.errors import UserError
from grpo.system.root import ROOT

# keys whose value is run as a command, or lets foreign code run
RUNS = ("command", "trust_remote_code", "unconfined", "sandbox")
HARMLESS = (
    "grpo.objectives.",
    "grpo.extras.losses.",
    "grpo.extras.critic.",
    "grpo.extras.teachers.",
    "grpo.rewards.basic.",
    "grpo.extras.grading.functions.",
    "grpo.rewards.functions.",  # its old name
    "grpo.training.callbacks.",
    "grpo.extras.early_stopping.",
    "grpo.extras.report.",
    "grpo.extras.trackers.",
    "torch.optim.",
    "grpo.config.objects.model_given",
)
OBJECT = "grpo.config.objects.given"  # an object that this Python program gives itself
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
FILE = re.compile(r"(.+\.(?:py[cd]?|so))(:\w+)?")


def check_code(config: Any, folder: Path, words: Sequence[str], allowed: bool, yes: str = "trust=true") -> None:
    """Raise UserError if a configuration that comes from a run's folder names code that neither this command line names nor the
    project at hand holds.

    config: resolved. words: the arguments that the user gave. allowed: whether they have `yes`, the word that says yes.
    """
    if allowed:
        return
    unnamed = [
        f"{key}={value}"
        for key, value in leaves(config)
        if is_code(key, value, folder) and not is_given(key, value, words)
    ]
    if unnamed:
        line = f"{folder} names code to run that this command line does not: {', '.join(unnamed[:3])[:300]}"
        raise UserError(f"{line}; read it, then name it in the command too, or add {yes} (docs/run.md)")


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value that is no mapping or list."""
    if isinstance(node, dict) and node.get("_target_") == OBJECT:
        return
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, node


def is_given(key: str, value: Any, words: Sequence[str]) -> bool:
    """Return whether the user's own arguments have this value: as a text anywhere, anything else as that of its key."""
    if isinstance(value, str):
        return any(value in word for word in words)
    return any(word.lstrip("+").partition("=")[0] == key for word in words)


def is_code(key: str, value: Any, folder: Path) -> bool:
    """Return whether a value makes a program run code that neither belongs to the project at hand nor stands in conf/."""
    last = key.rpartition(".")[2]
    if last in RUNS:
        return bool(value)
    if not isinstance(value, str) or value == "???" or value in shipped() or value.startswith(HARMLESS):
        return False
    if value.startswith("mcp:") or (last == "_target_" and value.startswith("grpo.")):
        return True  # a command; any function of ours, with any arguments
    if file := FILE.fullmatch(value):
        return not holds(Path(file[1]).expanduser(), folder)
    if DOTTED.fullmatch(value) and not Path(value).exists():
        origin = origin_of(value.partition(".")[0])
        return last == "_target_" if origin is None else not holds(origin, folder)
    return last == "_target_"


@cache
def shipped() -> frozenset[str]:
    """Return the dotted paths in conf/, which its own files name."""
    return frozenset(m[0] for file in CONF.rglob("*.yaml") for m in DOTTED.finditer(file.read_text(encoding="utf-8")))


def origin_of(package: str) -> Path | None:
    """Return where a top-level package would be imported from; None if there is none. Nothing is imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    return Path("/", places[0] or "") if places else None  # a built-in module has no file


def holds(path: Path, folder: Path) -> bool:
    """Return whether a file belongs to the project at hand: below the working folder or this project, in no run's folder."""
    path = path.resolve()
    for root in (Path.cwd().resolve(), ROOT.resolve()):
        between = [parent for parent in path.parents if root in parent.parents]
        in_a_run = folder.resolve() in path.parents or any((parent / "manifest.json").exists() for parent in between)
        if root in path.parents and not in_a_run and "site-packages" not in path.parts:
            return True
    return False
