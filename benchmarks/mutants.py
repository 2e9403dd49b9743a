"""Plant the faults of mutants.yaml one by one, and see whether the tests near them fail: what the tests can find, as a number.

    python benchmarks/mutants.py [WORD ...]

WORD: only faults whose place or fault has one of these words. The faults are planted in a copy of the project. Each is tried in a
fork of a process that has imported the libraries and nothing of the project, so it costs its tests and no more. Prints the test
that fails, or `SURVIVED`; the exit code is 1 if a fault survives that the table does not call equivalent.
"""

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
LIBRARIES = "pytest numpy torch transformers lightning pandas peft datasets pyarrow.parquet hydra.utils math_verify"
CHOICE = ("-k", "not refused")  # refused settings take seconds to compose, and have no part in these faults
SECONDS = 240  # of computing for the tests of one fault, which may make a loop endless
HANGS = 1800  # seconds; a fault may also make a thread wait for ever
PARTS = ("grpo", "tests", "conf", "tasks", "docs", "examples", "benchmarks", "hydra_plugins", "*.py", "*.toml", "*.md")


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a file. tests: the arguments of pytest. equivalent: why no test can find it."""

    file: str
    fault: str
    old: str
    new: str
    tests: str
    equivalent: str = ""

    @property
    def room(self) -> str:
        return self.file.removeprefix("grpo/").rpartition("/")[0]


def faults() -> list[Fault]:
    """Return the faults of the table. Raises ValueError for one that does not fit the code."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = [Fault(file, **{"tests": at["tests"], **one}) for file, at in table.items() for one in at["faults"]]
    for one in found:
        if (count := (ROOT / one.file).read_text(encoding="utf-8").count(one.old)) != 1 or one.old == one.new:
            raise ValueError(f"{one.file}, {one.fault}: the old text occurs {count} times, not once: {one.old}")
        for word in one.tests.split():
            if "/" in word and not (ROOT / word).exists():
                raise ValueError(f"{one.file}, {one.fault}: there is no {word}")
    return found


class Watch:
    """A plugin of pytest that keeps the name of the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run(root: Path, tests: Sequence[str], said: Path) -> tuple[int, str, float]:
    """Run tests of the project at `root` in a fork of this process. Returns the exit code, the first test that failed, and the
    seconds of computing, those of its children included."""
    name = said.with_suffix(".name")
    name.unlink(missing_ok=True)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            of_pytest(root, tests, said, name)
        os._exit(9)
    begun, status = time.monotonic(), 0
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        time.sleep(0.05)
        if time.monotonic() - begun > HANGS:
            os.kill(child, signal.SIGKILL)
    _, status, usage = ended
    code = os.waitstatus_to_exitcode(status)
    failed = "out of time" if code in (-signal.SIGXCPU, -signal.SIGKILL) else name.read_text() if name.exists() else ""
    return code, failed, usage.ru_utime + usage.ru_stime


def of_pytest(root: Path, tests: Sequence[str], said: Path, name: Path) -> None:
    """Run tests in this process, and end it."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(place for place in sys.path if not Path(place).is_relative_to(ROOT))]
    watch = Watch()
    code = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *CHOICE, *tests], [watch])
    name.write_text(watch.failed)
    sys.stdout.flush()
    os._exit(int(code))


@contextlib.contextmanager
def planted(root: Path, one: Fault, number: int) -> Iterator[None]:
    """Plant a fault in the copy at `root`. number: its own, the file's time, so that no compiled file is taken for its."""
    file = root / one.file
    file.write_text(file.read_text(encoding="utf-8").replace(one.old, one.new), encoding="utf-8")
    os.utime(file, (number, number))
    try:
        yield
    finally:
        shutil.copy2(ROOT / one.file, file)


def copied(to: Path) -> Path:
    """Copy what the tests read."""
    for path in (path for part in PARTS for path in ROOT.glob(part)):
        if path.is_dir():
            shutil.copytree(path, to / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, to / path.name)
    return to


def main(words: list[str]) -> int:
    chosen = [one for one in faults() if not words or any(word in f"{one.file} {one.fault}" for word in words)]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for library in LIBRARIES.split():
        importlib.import_module(library)
    gc.freeze()
    rooms, lost = defaultdict(lambda: [0, 0, 0]), []
    with tempfile.TemporaryDirectory() as folder:
        root, said = copied(Path(folder, "grpo")), Path(folder, "said")
        files = [*dict.fromkeys(word for one in chosen for word in one.tests.split() if "/" in word)]
        code, failed, whole = run(root, files, said)
        if code:
            print(f"{said.read_text()}\nfails without a fault: {failed}")
            return 1
        for number, one in enumerate(chosen, 1):
            with planted(root, one, number):
                code, failed, seconds = run(root, one.tests.split(), said)
            whole += seconds
            verdict = failed.partition("/")[2] if code else "equivalent" if one.equivalent else "SURVIVED"
            if code and (not failed or one.equivalent):
                verdict = f"WRONG: {'not equivalent, ' if one.equivalent else ''}exit code {code}, {failed}"
            lost += [one] * verdict.startswith(("SURVIVED", "WRONG"))
            counts = rooms[one.room]
            counts[0] += 1
            counts[1] += bool(code)
            counts[2] += bool(one.equivalent)
            print(f"{one.file.removeprefix('grpo/'):30} {seconds:5.1f} s  {one.fault}\n{'':34}{verdict}", flush=True)
    print(f"\n{'room':20}{'planted':>9}{'killed':>9}{'equivalent':>12}")
    for room, counts in [*rooms.items(), ("all", [sum(x) for x in zip(*rooms.values(), strict=True)])]:
        print(f"{room:20}{counts[0]:9}{counts[1]:9}{counts[2]:12}")
    print(f"{whole:.0f} CPU s")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
