"""Finds functions by name, above all reward functions, and names the part of the reward that a function is.

Imports modules by name alone, ours too.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from grpo.system.errors import UserError
from grpo.system.exits import seen
from grpo.system.metrics import is_taken
from grpo.system.root import PACKAGE, ROOT

NAMES = ROOT / "conf" / "rewards.yaml"  # so that this module, and its users, need not know where a function is
TRL_GIVES = ("trainer_state", "log_metric", "log_extra")  # to every function, beside the lists
LISTS = {"prompts", "completions", "completion_ids", "truncated", "lengths", "outcomes", "environments"}
ALWAYS = LISTS | {"progress", *TRL_GIVES}  # arguments that every task has
OURS = ("grpo.", "tasks.")  # beginnings of the names of the project's modules
# usual columns of right answers
GOLDEN = ("answer", "gold", "solution", "target", "label", "ground_truth", "final_answer")
Function = Callable[..., Any]  # (prompts, completions, **columns) -> list[float | None | Reward], or a coroutine of it
Functions = str | Function | Sequence[str | Function]  # names or functions


@cache
def name_table() -> dict[str, Any]:
    """Return what conf/rewards.yaml says: the modules of named functions, and what makes a reward of a model."""
    return yaml.safe_load(NAMES.read_text(encoding="utf-8"))


def shipped_modules() -> dict[str, Path]:
    """Return the files of the modules of named functions, by name; those of an appendix that is not there are left out."""
    files = {name: PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in name_table()["functions"]}
    return {name: file for name, file in files.items() if file.is_file()}


def locate(name: str) -> Function:
    """Return the function that a text names: one that comes with the project, a dotted path, FILE.py:NAME, or the folder or hub
    id of a sequence-classification model. Raises UserError if it is not found."""
    shipped = []
    for module in shipped_modules():
        shipped += (its := _functions_in(import_module(module), imported_too=False))
        if name in its:
            return imported(f"{module}.{name}", "the reward function")
    colon = ":" in name
    if Path(name).expanduser().is_dir() or ("/" in name and not colon and not name.endswith(".py")):
        return imported(name_table()["model"], "the reward model")(name)
    if not colon and "." not in name:
        raise not_shipped(name, shipped)
    return imported(name, "the reward function")


def not_shipped(name: str, shipped: Sequence[str]) -> UserError:
    """Return the error for a name without a dot that is none of the functions that come with the project."""
    near = get_close_matches(name, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    forms = f"{', '.join(shipped)}, a dotted path, FILE.py:NAME, or the folder or hub id of a reward model"
    return UserError(f"there is no reward function {name!r}{hint} Give one of {forms}")


def not_in(owner: str, what: str, name: str, names: Sequence[str]) -> UserError:
    """Return the error for a module that lacks a function. names: the functions that it has. what: see `imported`."""
    return UserError(f"{what} {name!r} is not there: {owner} has {', '.join(names) or 'none'}")


def not_imported(what: str, name: str, error: BaseException) -> UserError:
    """Return the error for a module that could not be imported. what: see `imported`."""
    reason = f"{type(error).__name__}: {error} (its folder must be on PYTHONPATH, or say FILE.py:NAME)"
    return UserError(f"{what} {name!r} cannot be imported: {reason}")


def lacks(function: str, parameter: str, columns: Iterable[str], where: str) -> UserError:
    """Return the error for rows without a column that a reward function needs. where: the name of their source."""
    present = sorted(columns)
    line = f"the reward function {function!r} needs {parameter!r}, which is no column of {where} ({', '.join(present)})"
    if parameter != "gold":
        return UserError(f"{line} and has no default value")
    column = next((name for name in GOLDEN if name in present), "COLUMN")
    return UserError(f"{line}: name the column that holds the right answers, as task.gold={column}")


def imported(name: str, what: str) -> Function:
    """Return the function with this dotted path, or FILE.py:NAME. what: the words for it in an error. Raises UserError."""
    colon = ":" if ":" in name else ""
    owner, _, attribute = name.rpartition(colon or ".")
    if name.endswith(".py"):
        raise UserError(f"{what} {name!r} is a file: say which of its functions, {name}:NAME")
    try:
        with seen(f"the import of {owner}"):
            if colon and not Path(owner).expanduser().is_file():
                raise FileNotFoundError(f"there is no file {owner}")
            module = _module_of_file(Path(owner).expanduser().resolve()) if colon else import_module(owner)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise not_imported(what, name, error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise not_in(module.__name__, what, name, _functions_in(module))
    return function


def _functions_in(module: ModuleType, imported_too: bool = True) -> list[str]:
    """Return the names of a module's public callables, or of those alone that it defines."""
    public = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return [name for name, value in public.items() if imported_too or value.__module__ == module.__name__]


@cache
def _module_of_file(file: Path) -> ModuleType:
    """Run a file as a module, once for all functions in it."""
    spec = spec_from_file_location(file.stem, file)
    module = module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # before it runs, since a dataclass in it looks there
    spec.loader.exec_module(module)
    return module


def unwrapped(function: Function) -> Function:
    """Return the function without its partial arguments."""
    while isinstance(function, partial):
        function = function.func
    return function


def module_of(function: Function) -> str:
    """Return the name of the module that defines the function, or the class of a callable object."""
    inner = unwrapped(function)
    return getattr(inner, "__module__", None) or type(inner).__module__


def reward_name(function: Function) -> str:
    """Return the name of a function's part of the reward: its own, or MODULE.NAME if a metric of ours has that name."""
    function = unwrapped(function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{function.__module__}.{name}" if is_taken(name) else name
