"""Plant the faults of mutants.yaml one by one, and see whether the tests near them fail: what the tests can find, as a number.

    python benchmarks/mutants.py [WORD ...]

WORD: only faults whose place or fault has one of these words. The tests are imported and collected once. Each fault is planted in
the memory of a fork, where the functions that it changes get their new code: it costs the tests that it takes to find it, and no
file changes. Prints the test that fails, or `SURVIVED`; the exit code is 1 if a fault survives that is not called equivalent.
"""

import gc
import importlib
import inspect
import os
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
SECONDS = 120  # of computing for the tests of one fault, which may make a loop endless
HANGS = 1800  # seconds; a fault may also make a thread wait for ever
LEFT_OUT = "without_meaning_are_refused"  # composing each setting takes time, and no fault is in what refuses them


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a file. tests: files, each maybe with :: and a part of its tests' names. equivalent: why no test can
    find the fault."""

    file: str
    fault: str
    old: str
    new: str
    tests: str
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file.removeprefix('grpo/')}: {self.fault}"

    def concerns(self, test: str) -> bool:
        """Return whether a test, by its id, is one of those near the fault."""
        file, _, name = test.partition("::")
        near = (word.partition("::") for word in self.tests.split())
        return LEFT_OUT not in name and any(file == place and part in name for place, _, part in near)

    def codes(self) -> list[tuple[CodeType, CodeType]]:
        """Return the code of each function that the fault changes, before and after."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        before, after = (
            compile(source, ROOT / self.file, "exec") for source in (text, text.replace(self.old, self.new))
        )
        pairs = zip(functions(before), functions(after), strict=True)
        return [(old, new) for old, new in pairs if essence(old) != essence(new)]


def faults() -> list[Fault]:
    """Return the faults of the table. Raises ValueError for one that does not fit the code."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = [Fault(file, **{"tests": at["tests"], **one}) for file, at in table.items() for one in at["faults"]]
    for one in found:
        if (count := (ROOT / one.file).read_text(encoding="utf-8").count(one.old)) != 1:
            raise ValueError(f"{one.name}: the old text occurs {count} times, not once: {one.old}")
        if missing := [file for file in files([one]) if not (ROOT / file).is_file()]:
            raise ValueError(f"{one.name}: there is no {missing[0]}")
    return found


def files(chosen: Sequence[Fault]) -> list[str]:
    """Return the files of the tests that the faults need."""
    return list(dict.fromkeys(word.partition("::")[0] for one in chosen for word in one.tests.split()))


def functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of each function of a module or a class, but not of functions inside of functions."""
    for inner in (value for value in code.co_consts if isinstance(value, CodeType)):
        yield from (inner,) if inner.co_flags & inspect.CO_OPTIMIZED else functions(inner)


def essence(code: CodeType) -> tuple:
    """Return all of a function but its lines."""
    inner = (essence(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


def place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Trial:
    """A plugin of pytest that tries the faults in place of running the tests."""

    def __init__(self, chosen: Sequence[Fault], folder: Path) -> None:
        self.chosen, self.folder, self.failed, self.lost = chosen, folder, "", 0
        self.live: dict[tuple, list[FunctionType]] = defaultdict(list)  # the functions in memory, by their place

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Try each fault on the tests near it, after these tests have passed without one."""
        if session.testsfailed:
            return None  # pytest says which files could not be imported
        needed = [item for item in session.items if any(one.concerns(item.nodeid) for one in self.chosen)]
        self.find()
        failed, seconds = self.fork(needed, [])
        print(f"\n{len(needed)} tests without a fault: {failed or 'all pass'}, {seconds:.0f} CPU s\n", flush=True)
        self.lost += bool(failed)
        rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        finders: set[str] = set()
        for one in [] if failed else self.chosen:
            codes = one.codes()
            near = [item for item in needed if one.concerns(item.nodeid)]
            near.sort(key=lambda item: item.nodeid not in finders)  # what has found a fault may find the next one soon
            planted = codes and near and all(self.live[place(old)] for old, _ in codes)
            failed, more = self.fork(near, codes) if planted else ("", 0.0)
            verdict = failed or one.equivalent or "SURVIVED"
            if not planted:
                verdict = "WRONG: it changes no function in memory, or has no test"
            elif failed and one.equivalent:
                verdict = f"WRONG: not equivalent, {failed}"
            self.lost += verdict.startswith(("WRONG", "SURVIVED"))
            seconds += more
            finders.add(failed)
            for i, counts in enumerate((True, failed, one.equivalent)):
                rooms[one.file.rpartition("/")[0]][i] += bool(counts)
            print(f"{one.name}\n{more:7.1f} s  {verdict}", flush=True)
        print(f"\n{'room':22}{'planted':>9}{'killed':>9}{'equivalent':>12}")
        for room, counts in [*rooms.items(), ("all", [*map(sum, zip(*rooms.values(), strict=True))])]:
            print(f"{room:22}" + "".join(f"{count:9}" for count in counts))
        print(f"{seconds:.0f} CPU s", flush=True)
        return True

    def find(self) -> None:
        """Find the functions of the faults' files in memory."""
        for file in {one.file for one in self.chosen}:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        names = {str(ROOT / one.file) for one in self.chosen}
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename in names:
                self.live[place(each.__code__)].append(each)
        gc.freeze()  # a fork that collects garbage would copy all of it

    def fork(self, items: list[pytest.Item], codes: Sequence[tuple[CodeType, CodeType]]) -> tuple[str, float]:
        """Run the tests up to the first failure in a fork of this process, with new code in place of old. Returns the name of the
        test that failed, and the seconds of computing."""
        reads, writes = os.pipe()
        if not (child := os.fork()):
            try:
                self.play(items, codes)
            except BaseException as error:  # nothing may go on in this process
                self.failed = self.failed or f"{type(error).__name__}: {error}"
            os.write(writes, self.failed.encode())
            os._exit(0)
        os.close(writes)
        begun = time.monotonic()
        while not (ended := os.wait4(child, os.WNOHANG))[0]:
            time.sleep(0.02)
            if time.monotonic() - begun > HANGS:
                os.kill(child, signal.SIGKILL)
        with open(reads, "rb") as pipe:
            failed = pipe.read().decode()
        return failed or ("out of time" if ended[1] else ""), ended[2].ru_utime + ended[2].ru_stime

    def play(self, items: list[pytest.Item], codes: Sequence[tuple[CodeType, CodeType]]) -> None:
        """Run the tests up to the first failure."""
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1) if codes else (resource.RLIM_INFINITY,) * 2)
        for old, new in codes:
            for function in self.live[place(old)]:
                function.__code__ = new
        os.chdir(self.folder)
        config = items[0].config
        config.pluginmanager.unregister(name="terminalreporter")  # which would print each result
        for item, following in zip(items, [*items[1:], None], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return


def main(words: list[str]) -> int:
    chosen = [one for one in faults() if not words or any(word in one.name for word in words)]
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "project")  # looks like the project, and takes what a fault writes where it should not
        folder.mkdir()
        for path in (path for path in ROOT.iterdir() if not path.name.startswith(".")):
            (folder / path.name).symlink_to(path)
        trial = Trial(chosen, folder)
        plain = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary}/tests"]
        code = pytest.main([*plain, *files(chosen)], [trial])
    return int(bool(code or trial.lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
