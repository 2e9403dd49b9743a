"""Takes functions and classes from an appendix for the command line, if the tree has it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def of_appendix(name: str, otherwise: Any) -> Any:
    """Return what an appendix has under a name, as `sweep.sweep.reported`; `otherwise` in a tree without that appendix."""
    appendix, (module, _, what) = f"grpo.extras.{name.partition('.')[0]}", name.rpartition(".")
    spec = find_spec(appendix)
    if spec is None or spec.origin is None:  # a folder that has only compiled files counts as none
        return otherwise
    return getattr(import_module(f"grpo.extras.{module}"), what)
