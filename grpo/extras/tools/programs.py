"""The variables of programs that a task starts."""

import os
import sys
from pathlib import Path


def program_variables() -> dict[str, str]:
    """Return the variables of programs: ours, with this Python, and with the modules of this folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    modules = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    direct = dict.fromkeys(["NO_PROXY", "no_proxy"], ",".join(["127.0.0.1", known]))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules, **direct}
