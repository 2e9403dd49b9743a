"""The origin of a run besides its configuration: the user's files, uncommitted changes of the code, and installed packages."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

from grpo.system.files import surviving, write_text
from grpo.system.output.secrets import hidden
from grpo.system.output.users_code import is_users_file
from grpo.system.root import ROOT

log = logging.getLogger(__name__)

FILE = re.compile(r"[^\s'\"\[{,=]+\.py(?=:\w)")  # of FILE.py:NAME
GIT = 30.0  # seconds for one command of git
LARGEST = 1_000_000  # bytes of a file that is copied


def keep_code(folder: Path, arguments: Iterable[str]) -> dict[str, str]:
    """Copy the user's files to FOLDER/code, write uncommitted.patch and packages.txt. Returns the SHA-256 of each file by path.

    The user's files are those that are imported, and FILE of FILE.py:NAME in the arguments. A copy has no secrets in it.
    """
    contents = {file: file.read_bytes() for file in sorted(user_files(arguments))}
    hashes = {str(file): sha256(content).hexdigest() for file, content in contents.items()}
    with surviving(f"{folder}/code"):
        write_text(folder / "packages.txt", packages())
        if changed := patch():
            write_text(folder / "uncommitted.patch", hidden(changed))
        for file, content in contents.items():
            if len(content) <= LARGEST:
                copy = folder / "code" / f"{file.stem}.{hashes[str(file)][:8]}{file.suffix}"
                write_text(copy, hidden(content.decode("utf-8", errors="replace")))
    return hashes


@cache
def packages() -> str:
    """Return all installed packages with their versions, a line each."""
    names = {f"{package.name}=={package.version}" for package in distributions()}
    return "\n".join(sorted(names, key=str.lower)) + "\n"


def user_files(arguments: Iterable[str]) -> set[Path]:
    """Return the Python files in use that are the user's. The patch has the changes of this project's own."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    named = [name for argument in arguments for name in FILE.findall(argument)]
    names = {name for name in [*loaded, *named] if name and name.endswith(".py")}
    files = {Path(name).expanduser().resolve() for name in names if is_users_file(name)}
    return {file for file in files if file.is_file() and is_users_file(str(file))}


def patch() -> str:
    """Return the changes of the code since its commit; "" outside of a checkout, and where there are none."""
    return git(ROOT, "diff", "HEAD", "--", ".") or ""


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None outside of a checkout, without git and, with a warning, after GIT seconds."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, errors="replace", timeout=GIT)
    except subprocess.TimeoutExpired:
        log.warning("git %s did not end within %g s in %s: the run is recorded without it", arguments[0], GIT, folder)
        return None
    except OSError:
        return None
    return None if done.returncode else done.stdout
