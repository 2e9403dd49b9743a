"""Modules that have moved keep their old names: a user's configuration, program or command that has one still works.

moved.tsv has a line for each: the old name and the new one. `import OLD` gives the module that has the new name, and
`python -m OLD` runs it; the log says the new name once.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

log = logging.getLogger(__name__)
COMMANDS = {
    f"grpo.{name}"
    for name in ["export", "from_trl", "launch", "plots", "predict", "prefetch", "report", "rewards", "serve"]
}
"""Short names of programs, which stay: `python -m grpo.serve`."""


class Moved:
    """Finds modules by their old names: a finder of sys.meta_path, and the loader of what it finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what imports an old name, or None for another."""
        if name not in new_names():
            return None
        new = importlib.util.find_spec(new_names()[name])  # its file: `python -m` puts it into sys.argv
        return ModuleSpec(name, self, origin=new.origin, is_package=new.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has the new name."""
        new = new_names()[spec.name]
        if spec.name not in COMMANDS:
            log.warning("%s is %s now", spec.name, new)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # which the import system now replaces by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing more: the module has run under its new name."""
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of a program: what `python -m` runs."""
        spec = importlib.util.find_spec(new_names()[name])
        return spec.loader.get_code(new_names()[name])


@cache
def new_names() -> dict[str, str]:
    """Return the lines of moved.tsv."""
    lines = Path(__file__).parents[1].joinpath("moved.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def new_name(name: str) -> str:
    """Return the dotted name that something has now: a module, or what is in one."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if new := new_names().get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return name


def keep_old_names() -> None:
    """Let the old names of moved.tsv be imported; called once, by `import grpo`."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
