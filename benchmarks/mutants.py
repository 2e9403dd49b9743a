"""Plant the faults of mutants.yaml one by one, and see whether the tests near them fail: what the tests can find, as a number.

    python benchmarks/mutants.py [--slow] [--map=FOLDER] [--part=1/2] [WORD ...]

--slow: on slow tests, too, after the quick ones. WORD: only faults whose place or fault has one of these words. The tests are
imported and collected once. Each fault is planted in the memory of a fork, where the functions that it changes get their new
code: it costs the tests that it takes to find it, and no file changes. Prints the test that fails, or `SURVIVED`; the exit code
is 1 if a fault survives that is not called equivalent.

With a folder that `benchmarks/finds.py record` has filled, the tests of a fault are those that run its lines, cheapest first, and
go on after the first that fails while they are cheap: what each of them finds is added to the folder.
"""

import argparse
import ast
import gc
import importlib
import inspect
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from finds import Map

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
SECONDS = 120  # of computing for the tests of one fault, which may make a loop endless
HANGS = 1800  # seconds; a fault may also make a thread wait for ever
LONG = 30  # CPU seconds after which a fault has survived the tests of a map that run its lines
CHEAP = 0.5  # CPU seconds in which further tests of a map may find a fault too
LEFT_OUT = "without_meaning_are_refused"  # composing each setting takes time, and no fault is in what refuses them


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a file. tests: files, each maybe with :: and a part of its tests' names; all of the room by default.
    equivalent: why no test can find the fault."""

    file: str
    fault: str
    old: str
    new: str
    tests: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file.removeprefix('grpo/')}: {self.fault}"

    @property
    def room(self) -> str:
        """The folder of the file's room in tests/."""
        return "/".join(Path(self.file.removeprefix("grpo/")).parts[: 2 if "/extras/" in self.file else 1])

    def near(self, item: pytest.Item) -> bool:
        """Return whether a test is one of those near the fault."""
        file, _, name = item.nodeid.partition("::")
        if not self.tests:
            return file.rpartition("/")[0] == f"tests/{self.room}"
        words = (word.partition("::") for word in self.tests.split())
        return LEFT_OUT not in name and any(file == place and part in name for place, _, part in words)

    def lines(self) -> range:
        """Return the lines of the statements that the fault changes, of which tests run at least one."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        first = text[: text.index(self.old)].count("\n") + 1
        last = first + self.old.rstrip("\n").count("\n")
        for node in ast.walk(ast.parse(text)):  # outer ones first
            if isinstance(node, ast.stmt) and node.lineno <= first <= node.end_lineno:
                inner = [each.lineno for each in getattr(node, "body", []) if isinstance(each, ast.stmt)]
                if not inner or first < inner[0]:
                    return range(node.lineno, max(last, inner[0] - 1 if inner else node.end_lineno) + 1)
                found = range(first, last + 1)
        return found

    def codes(self) -> list[tuple[CodeType, CodeType]]:
        """Return the code of each function that the fault changes, before and after."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        before, after = (
            compile(source, ROOT / self.file, "exec") for source in (text, text.replace(self.old, self.new))
        )
        return [(old, new) for old, new in pairs(before, after) if essence(old) != essence(new)]


def faults() -> list[Fault]:
    """Return the faults of the table. Raises ValueError for one that does not fit the code."""
    text = TABLE.read_text(encoding="utf-8")
    if twice := [file for file, times in Counter(re.findall(r"^(\S+):$", text, re.M)).items() if times > 1]:
        raise ValueError(f"{twice[0]} is there twice, and YAML keeps the second")
    table = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = [Fault(file, **{"tests": at.get("tests", ""), **one}) for file, at in table.items() for one in at["faults"]]
    for one in found:
        if (count := (ROOT / one.file).read_text(encoding="utf-8").count(one.old)) != 1:
            raise ValueError(f"{one.name}: the old text occurs {count} times, not once: {one.old}")
        if missing := [file for file in files([one]) if not (ROOT / file).exists()]:
            raise ValueError(f"{one.name}: there is no {missing[0]}")
        for word in one.tests.split():
            file, _, part = word.partition("::")
            if part not in (ROOT / file).read_text(encoding="utf-8"):
                raise ValueError(f"{one.name}: no test of {file} has {part} in its name")
    return found


def files(chosen: Sequence[Fault]) -> list[str]:
    """Return the files of the tests that the faults need; a folder where a fault names none."""
    named = ((one.tests or f"tests/{one.room}").split() for one in chosen)
    return list(dict.fromkeys(word.partition("::")[0] for words in named for word in words))


def pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the code of each function of a module, a class or a function, before a fault and after, inner ones too: a function
    that another one has made lives on. Inner ones are left out where the fault changes their number."""
    inner = [[value for value in code.co_consts if isinstance(value, CodeType)] for code in (before, after)]
    if len(inner[0]) == len(inner[1]):
        for old, new in zip(*inner, strict=True):
            if old.co_flags & inspect.CO_OPTIMIZED and old.co_freevars == new.co_freevars:
                yield old, new
            yield from pairs(old, new)


def essence(code: CodeType) -> tuple:
    """Return all of a function but its lines."""
    inner = (essence(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


def planted(fault: str) -> None:
    """Plant the fault of this name in this process, which is a command that a test has started."""
    (one,) = [each for each in faults() if each.name == fault]
    trial = Trial([one], ROOT)
    trial.find()
    trial.plant(one)


def place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Trial:
    """A plugin of pytest that tries the faults in place of running the tests."""

    def __init__(self, chosen: Sequence[Fault], folder: Path, seen: "Map | None" = None) -> None:
        self.chosen, self.folder, self.seen, self.lost = chosen, folder, seen, 0
        self.failed: list[str] = []
        self.sound: dict[str, bool] = {}  # tests of a map that have failed with a fault: whether they pass without
        self.live: dict[tuple, list[FunctionType]] = defaultdict(list)  # the functions in memory, by their place

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Try each fault on the tests near it that pass without one."""
        if session.testsfailed:
            return None  # pytest says which files could not be imported
        from helpers import programs

        self.find()
        programs.server()  # one for all forks
        seconds, finders, found = 0.0, Counter(), []
        if not self.seen:
            needed = [item for item in session.items if any(one.near(item) for one in self.chosen)]
            found, seconds = self.fork(needed, None)
            print(f"\n{len(needed)} tests without a fault: {found or 'all pass'}, {seconds:.0f} CPU s\n", flush=True)
            self.lost = len(found)
        sound = [item for item in session.items if item.nodeid not in found]
        rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for one in self.chosen:
            near = self.seen.near(one, sound) if self.seen else list(filter(one.near, sound))
            if not self.seen:
                # what has found a fault may find the next one soon
                near.sort(key=lambda item: (item.get_closest_marker("slow") is not None, -finders[item.nodeid]))
            planted = near and any(self.live[place(old)] for old, _ in one.codes())
            found, more = self.fork(near, one) if planted else ([], 0.0)
            found = [test for test in found if not self.seen or self.passes(test, near)]
            verdict = found[0] if found else one.equivalent or "SURVIVED"
            if not planted:
                verdict = "WRONG: it changes no function in memory, or no test runs it"
            elif found and one.equivalent:
                verdict = f"WRONG: not equivalent, {found[0]}"
            self.lost += verdict.startswith(("WRONG", "SURVIVED"))
            seconds += more
            finders.update(found)
            for i, counts in enumerate((True, found, one.equivalent)):
                rooms[one.room][i] += bool(counts)
            print(f"{one.name}\n{more:7.1f} s  {verdict}", flush=True)
            if self.seen:
                self.seen.add(one.name, found)
        print(f"\n{'room':22}{'planted':>9}{'killed':>9}{'equivalent':>12}")
        for name, counts in [*sorted(rooms.items()), ("all", [*map(sum, zip(*rooms.values(), strict=True))])]:
            print(f"{name:22}" + "".join(f"{count:9}" for count in counts))
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

    def passes(self, test: str, items: Sequence[pytest.Item]) -> bool:
        """Return whether a test passes without a fault, which is tried once."""
        if test not in self.sound:
            self.sound[test] = not self.fork([item for item in items if item.nodeid == test], None)[0]
        return self.sound[test]

    def plant(self, one: Fault) -> None:
        """Give the functions that the fault changes their new code."""
        for old, new in one.codes():
            for function in self.live[place(old)]:
                function.__code__ = new

    def fork(self, items: list[pytest.Item], one: Fault | None) -> tuple[list[str], float]:
        """Run the tests in a fork of this process, with a fault or without. Returns those that fail, see `play`, and the seconds
        of computing."""
        with tempfile.NamedTemporaryFile("r") as told:
            if not (child := os.fork()):
                try:
                    self.play(items, one, Path(told.name))
                except BaseException:  # nothing may go on in this process
                    os._exit(1)
                os._exit(0)
            begun = time.monotonic()
            while not (ended := os.wait4(child, os.WNOHANG))[0]:
                time.sleep(0.02)
                if time.monotonic() - begun > (HANGS if self.seen is None else SECONDS):
                    os.kill(child, signal.SIGKILL)
            failed, running = [], "no test"
            for line in told.read().splitlines():
                running, _, outcome = line.partition("\t")
                if outcome == "failed":
                    failed.append(running)
        if ended[1]:
            failed.append(running)  # it took too long, or ended the process
        return list(dict.fromkeys(failed)), ended[2].ru_utime + ended[2].ru_stime

    def play(self, items: list[pytest.Item], one: Fault | None, told: Path) -> None:
        """Run the tests up to the first that fails, with a map also those after it that are cheap."""
        if one:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            self.plant(one)
            os.environ["PLANTED_FAULT"] = one.name  # for the commands that tests start
        os.chdir(self.folder)
        config = items[0].config
        config.pluginmanager.unregister(name="terminalreporter")  # which would print each result
        with open(told, "w", buffering=1) as lines:
            for item, following in zip(items, [*items[1:], None], strict=True):
                print(item.nodeid, file=lines)
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if item.nodeid in self.failed:
                    print(item.nodeid, "failed", sep="\t", file=lines)
                spent = time.process_time()
                if one and ((self.seen and spent > LONG) or (self.failed and (not self.seen or spent > CHEAP))):
                    return


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--slow", action="store_true", help="also on slow tests; with a map always")
    parser.add_argument("--map", type=Path, metavar="FOLDER")
    parser.add_argument("--part", default="1/1", metavar="1/2", help="only every second fault, from the first")
    given = parser.parse_args(words)
    part, parts = map(int, given.part.split("/"))
    words = given.words
    chosen = [one for one in faults() if not words or any(word in one.name for word in words)][part - 1 :: parts]
    os.chdir(ROOT)
    del sys.argv[1:]  # a run writes it down
    seen = None
    if given.map:
        from finds import Map

        seen = Map(given.map.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "project")  # looks like the project, and takes what a fault writes where it should not
        folder.mkdir()
        for path in (path for path in ROOT.iterdir() if not path.name.startswith(".")):
            (folder / path.name).symlink_to(path)
        trial = Trial(chosen, folder, seen)
        plain = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary}/tests"]
        marked = ["-m", "not nightly and not vllm"] if given.slow or seen else []
        code = pytest.main([*plain, *marked, *([] if seen else files(chosen))], [trial])
    return int(bool(code or trial.lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
