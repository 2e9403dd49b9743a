"""Names code of the user's in errors: which function or class it is, and where it stands."""

import inspect
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).parents[2]
LIBRARIES = ("site-packages", "dist-packages", str(Path(sysconfig.get_path("stdlib"))))


def is_users_file(file: str | None) -> bool:
    """Return whether a file of Python is neither the project's nor a library's."""
    if not file or file.startswith("<") or any(part in file for part in LIBRARIES):
        return False
    inner = Path(file).resolve()
    return not any(inner.is_relative_to(HOUSE / room) for room in ("grpo", "tasks", "hydra_plugins")) and (
        inner not in (HOUSE / "train.py", HOUSE / "eval.py")
    )


def source_of(code: Any) -> tuple[str, int] | None:
    """Return file and line of a function, a class, or an object's class; None if they are unknown."""
    while isinstance(code, partial):
        code = code.func
    code = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    try:
        return inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):  # typed in, or built in
        return None


def is_own(code: Any) -> bool:
    """Return whether a function, a class or an object is of the user's code."""
    return (place := source_of(code)) is not None and is_users_file(place[0])


def code_name(code: Any) -> str:
    """Return the name of a function, or of an object's class; of the user's code with its place, as NAME, FILE.py:LINE."""
    while isinstance(code, partial):
        code = code.func
    name = getattr(code, "__name__", type(code).__name__)
    return f"{name}, {file_line(*source_of(code))}" if is_own(code) else name


def file_line(file: str, line: int) -> str:
    """Return FILE.py:LINE, below the current folder without what leads there."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def of_user(code: Any, error: BaseException) -> str:
    """Return " (NAME, FILE.py:LINE)" of the user's code, and the line of it that raised; "" for other code."""
    if not is_own(code):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    raised = f", raised in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f" ({code_name(code)}{raised})"
