"""Names code of the user's in errors: which function or class it is, and where it stands."""

import inspect
import os
import sys
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from grpo.system.root import PACKAGE, ROOT

OURS = [PACKAGE, *(ROOT / name for name in ("tasks", "hydra_plugins", "train.py", "eval.py"))]
PYTHON = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
# an environment may take the packages of another one
PYTHON += [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
PLACES = {place for path in [*OURS, *PYTHON] for place in (path, path.resolve())}
OTHERS = tuple(
    str(place) if place.suffix == ".py" else f"{place}{os.sep}" for place in PLACES
)  # what their files begin with


def is_users_file(file: str | None) -> bool:
    """Return whether a file belongs neither to this project, nor to Python, nor to an installed package. file: None or <...> for
    code without one."""
    return bool(file) and not file.startswith(("<", *OTHERS)) and not str(Path(file).resolve()).startswith(OTHERS)


def inner_of(code: Any) -> Any:
    """Return a function or a class: that in a partial function, or that of an object."""
    while isinstance(code, partial):
        code = code.func
    return code if inspect.isclass(code) or inspect.isroutine(code) else type(code)


def is_own(code: Any) -> bool:
    """Return whether a function, a class or an object is of the user's code."""
    try:
        return is_users_file(inspect.getsourcefile(inner_of(code)))
    except TypeError:  # built in
        return False


def code_name(code: Any) -> str:
    """Return the name of a function, or of an object's class; of the user's code with its place, as NAME, FILE.py:LINE."""
    inner = inner_of(code)
    if not is_own(inner):
        return inner.__name__
    try:
        return f"{inner.__name__}, {file_line(inspect.getsourcefile(inner), inspect.getsourcelines(inner)[1])}"
    except OSError:  # typed in
        return inner.__name__


def file_line(file: str, line: int) -> str:
    """Return FILE.py:LINE, below the current folder without what leads there."""
    return f"{from_here(file)}:{line}"


def from_here(path: str | Path) -> Path:
    """Return a path, below the current folder without what leads there."""
    return Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else Path(path)


def of_user(code: Any, error: BaseException) -> str:
    """Return " (NAME, FILE.py:LINE)" of the user's code, and the line of it that raised; "" for other code."""
    if not is_own(code):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    raised = f", raised in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f" ({code_name(code)}{raised})"
