"""Find what each test finds: the CPU seconds that it takes, the lines that it runs, and what no other test finds.

    python benchmarks/finds.py record FOLDER [ARGUMENT OF PYTEST ...]
    python benchmarks/mutants.py --map=FOLDER
    python benchmarks/finds.py tests FOLDER [WORD ...]
    python benchmarks/finds.py choose FOLDER SECONDS CHEAP

`record` runs tests under coverage, in processes that they start too, and adds what they cost and run to a folder. `tests` prints,
for each test whose name has one of the words, dearest first: CPU seconds, lines of grpo and tasks, lines that only it runs,
planted faults that it kills, faults that no other test was seen to kill. `choose` prints the tests that a suite of so many CPU
seconds, as they were recorded, leaves out: see Map.choose.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

import coverage
import pytest

if TYPE_CHECKING:
    from mutants import Fault

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = """[run]
source = {root}/grpo, {root}/tasks
data_file = {folder}/lines/coverage
parallel = true
core = ctrace
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork, subprocess
"""
PHASE = re.compile(r" \((setup|call|teardown)\)$")  # of a test, after its name in $PYTEST_CURRENT_TEST
FAULT = 20  # a fault that is killed counts as so many lines that are run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write down whose lines the next ones are."""
    if running := coverage.Coverage.current():
        running.switch_context(item.nodeid)
    return (yield)


def record(folder: Path, words: list[str]) -> int:
    """Run the tests that the words ask for, and add what they run and cost to the folder."""
    (folder / "lines").mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.ini"
    settings.write_text(SETTINGS.format(root=ROOT, folder=folder))
    here = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-p", "finds"]
    costs = folder / f"costs{len(list(folder.glob('costs*.jsonl')))}.jsonl"
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*here, "--forks=2", f"--costs={costs}", *words], cwd=ROOT, env=environment).returncode


class Map:
    """A folder's knowledge of the tests: CPU seconds by test, tests by line, and the tests that kill each fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: Counter[str] = Counter()
        for file in folder.glob("costs*.jsonl"):
            for phase in map(json.loads, file.read_text().splitlines()):
                self.seconds[phase["test"]] += phase.get("cpu", 0)  # none if it ended its process
        self.runs: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))  # file, line, tests
        for file in sorted(folder.glob("lines/*")):
            self.read(file)
        self.kills: dict[str, list[str]] = {}
        for file in folder.glob("kills*.jsonl"):
            self.kills |= dict(map(json.loads, file.read_text().splitlines()))

    def read(self, file: Path) -> None:
        """Add the lines that a process has run, for the test that its context names."""
        data = coverage.CoverageData(basename=str(file))
        data.read()
        for name in data.measured_files():
            at = self.runs[str(Path(name).relative_to(ROOT))]
            for line, contexts in data.contexts_by_lineno(name).items():
                at[line].update(PHASE.sub("", context) for context in contexts)

    def near(self, fault: "Fault", items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Return the tests that run a fault's statement, those of its room first, then the cheapest first."""
        tests = set().union(*(self.runs[fault.file].get(line, ()) for line in fault.lines()))
        near, room = (item for item in items if item.nodeid in tests), f"tests/{fault.room}/"
        return sorted(near, key=lambda item: (not item.nodeid.startswith(room), self.seconds[item.nodeid]))

    def add(self, fault: str, tests: Sequence[str]) -> None:
        """Write down which tests kill a fault."""
        with open(self.folder / f"kills{os.getpid()}.jsonl", "a") as lines:
            lines.write(json.dumps([fault, list(tests)]) + "\n")

    def finds(self) -> dict[str, set]:
        """Return what each test finds: the lines that it runs, as (file, line), and the faults that it kills, as words."""
        found: dict[str, set] = defaultdict(set)
        for file, lines in self.runs.items():
            for line, tests in lines.items():
                for test in tests:
                    found[test].add((file, line))
        for fault, tests in self.kills.items():
            for test in tests:
                found[test].add(fault)
        return {test: found[test] for test in self.seconds}

    def choose(self, seconds: float, cheap: float) -> list[str]:
        """Return the tests that a suite of so many CPU seconds leaves out.

        It has every test below `cheap` seconds, and those of the tree itself (tests/test_*.py), which run few lines. The others
        come in by what they find that no chosen one finds, for each second: a line counts one, a fault counts FAULT. Tests that
        find nothing new come last, cheapest first. A test is named without its parameters if all of them are left out."""
        found = self.finds()
        taken = {test for test, cost in self.seconds.items() if cost < cheap or test.startswith("tests/test_")}
        seen = set().union(*(found[test] for test in taken))
        left, spent = {*found} - taken, sum(self.seconds[test] for test in taken)

        def worth(test: str) -> float:
            return sum(FAULT if isinstance(each, str) else 1 for each in found[test] - seen) / self.seconds[test]

        queue = [(-worth(test), self.seconds[test], test) for test in left]
        heapify(queue)
        while queue:
            _, cost, test = heappop(queue)
            now = (-worth(test), cost, test)
            if queue and now > queue[0]:  # others have found it since
                heappush(queue, now)
            elif spent + cost <= seconds:
                spent += cost
                seen |= found[test]
                left.remove(test)
        chosen = {test.partition("[")[0] for test in {*found} - left}
        return sorted({test if (name := test.partition("[")[0]) in chosen else name for test in left})


def show(seen: Map, words: Sequence[str]) -> None:
    """Print what each test takes and finds, dearest first."""
    found = seen.finds()
    times = Counter(each for finds in found.values() for each in finds)
    print(f"{'CPU s':>8}{'lines':>8}{'alone':>8}{'faults':>8}{'alone':>8}")
    for test, cost in seen.seconds.most_common():
        if not words or any(word in test for word in words):
            kinds = Counter(isinstance(each, str) for each in found[test])  # False: lines, True: faults
            alone = Counter(isinstance(each, str) for each in found[test] if times[each] == 1)
            print(f"{cost:8.2f}{kinds[False]:8}{alone[False]:8}{kinds[True]:8}{alone[True]:8}  {test}")


if __name__ == "__main__":
    command, folder, *words = sys.argv[1:]
    folder = Path(folder).resolve()
    if command == "record":
        sys.exit(record(folder, words))
    if command == "choose":
        print("\n".join(Map(folder).choose(*map(float, words))))
    else:
        show(Map(folder), words)
