"""CPU seconds of tests, by room and by test, with what they compose, train and start. `pytest --costs=FILE.jsonl` shows them.

The seconds are those of a test's process, of the processes that it waited for, and of the commands that helpers/programs.py forks
for it. They scatter by a tenth or two, and grow on a busy machine, so `--budget` divides them by the time of a piece of work that
is measured beside the tests. That is still half wrong on some machines, so only a room that takes twice its budget fails. Counts
do not scatter.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

# CPU seconds that the quick tests of a room (tests/X, tests/extras/X) may take on a machine whose `pace` is PACE.
# A feature pays for its tests' time
BUDGET = {
    "all": 240, "apps": 7, "config": 15, "data": 3, "engines": 6, "env": 5, "evaluation": 3, "families": 4,
    "models": 14, "objectives": 13, "programs": 25, "rewards": 4, "rollout": 6, "runs": 4, "system": 13, "tasks": 8,
    "tests": 24, "training": 18, "vllm_engines": 3, "extras/ahead": 20, "extras/critic": 4, "extras/curves": 3,
    "extras/datasets": 3, "extras/health": 3, "extras/terminal": 10, "extras/demo": 5, "extras/devices": 3,
    "extras/early_stopping": 3, "extras/export": 4, "extras/float32_head": 5,
    "extras/grading": 5, "extras/images": 14, "extras/judges": 4, "extras/forecast": 7, "extras/kernels": 8, "extras/launch": 10,
    "extras/network": 3, "extras/state_layers": 5,
    "extras/losses": 3, "extras/migration": 7, "extras/optimizers": 3, "extras/preflight": 12, "extras/programs": 10,
    "extras/quantized": 3, "extras/report": 3, "extras/scores": 4, "extras/selection": 3, "extras/serve": 19,
    "extras/shared_weights": 3, "extras/sources": 3, "extras/sweep": 6, "extras/teachers": 27, "extras/tools": 8,
    "extras/trackers": 7, "extras/vllm_server": 8, "extras/workers": 4,
}  # fmt: skip
PACE = 0.0140
NOISE = 2.0  # the pace does not explain it: at one pace the same tests took 0.9 to 1.7 times their budget
PHASES: list[dict] = []  # a line of the file for each phase of each test
COUNTS: Counter[str] = Counter()  # of this process
EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
CALLS = [
    ("hydra._internal.config_loader_impl", "ConfigLoaderImpl", "_load_configuration_impl", "compositions"),
    ("lightning.pytorch", "Trainer", "fit", "runs"),
]
spent = 0.0  # when the phase began
file = ""  # that the latest test is in
commands = ""  # the file in which helpers/programs.py tells what commands took


def seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pace() -> float:
    """Return the CPU seconds of a fixed piece of work, which grow as those of tests do where others use the machine."""
    begun = time.process_time()
    json.loads(json.dumps([{str(i): [i, i / 7, None]} for i in range(6000)]))
    return time.process_time() - begun


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="print costs, and write those of each phase of each test to this file")
    parser.addoption("--budget", action="store_true", help="fail if a room takes more than its CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    global commands
    if config.option.costs or config.option.budget:
        os.environ["COSTS_OF_COMMANDS"] = commands = tempfile.mkstemp(suffix=".jsonl")[1]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.costs:
        sys.addaudithook(lambda event, _: COUNTS.update(["processes"]) if event in EVENTS else None)
        for module, holder, function, what in CALLS:
            if module in sys.modules:  # else no test uses it
                holder = getattr(sys.modules[module], holder)
                setattr(holder, function, counted(getattr(holder, function), what))


def counted(function: Callable, what: str) -> Callable:
    def counting(*given, **named):
        COUNTS[what] += 1
        return function(*given, **named)

    return counting


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    global spent, file
    COUNTS.clear()
    wanted = item.config.option.costs or item.config.option.budget
    if wanted and item.nodeid.partition("::")[0] != file:
        file = item.nodeid.partition("::")[0]
        COUNTS["pace"] = pace()
    spent = seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global spent
    report = yield
    before, spent = spent, seconds()
    report.cost = {"cpu": round(spent - before, 4), **COUNTS}
    COUNTS.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cost = {"wall": round(report.duration, 3), **getattr(report, "cost", {})}
    PHASES.append({"test": report.nodeid, "when": report.when, **cost})


def by_room() -> dict[str, Counter]:
    """Return the sums of each folder of tests/, and of all."""
    rooms: dict[str, Counter] = defaultdict(Counter)
    for phase in PHASES:
        for name in ("all", room(phase["test"])):
            rooms[name].update({"tests": phase["when"] == "call", **numbers(phase)})
    return rooms


def room(test: str) -> str:
    """Return the folder of a test: X of tests/X, extras/X of tests/extras/X, tests of tests itself."""
    return "/".join(test.partition("::")[0].split("/")[1:-1]) or "tests"


def numbers(phase: dict) -> dict[str, float]:
    return {name: number for name, number in phase.items() if name not in ("test", "when", "pace")}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that passed if a room is over its budget; each such room is a line."""
    config = session.config
    if commands:  # not the file of a suite that has started this one
        PHASES.extend(json.loads(line) for line in Path(commands).read_text().splitlines())
        Path(commands).unlink()
    if config.option.budget and exitstatus == pytest.ExitCode.OK:
        slower = median(phase["pace"] for phase in PHASES if "pace" in phase) / PACE
        for room, sums in by_room().items():
            if sums["cpu"] / slower > NOISE * BUDGET.get(room, 0):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                line = f"{room} took {sums['cpu'] / slower:.1f} of {BUDGET.get(room, 0)} CPU seconds (at pace {slower:.2f}): "
                line += "cheapen tests, or raise BUDGET in tests/helpers/costs.py"
                config.get_terminal_writer().line(line, red=True)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if not config.option.costs or not PHASES:
        return
    config.option.costs.write_text("".join(json.dumps(phase) + "\n" for phase in PHASES))
    rooms, tests, waits = by_room(), Counter(), Counter()
    for phase in PHASES:
        tests[phase["test"]] += phase.get("cpu", 0)
        waits[phase["test"]] += phase.get("wall", 0)
    columns = ("cpu", "tests", "compositions", "runs", "processes")
    slower = median(phase["pace"] for phase in PHASES if "pace" in phase) / PACE
    terminalreporter.section(f"CPU seconds by room, at pace {slower:.2f}")
    terminalreporter.line(f"{'':20}" + "".join(f"{column:>14}" for column in columns))
    for name, sums in sorted(rooms.items(), key=lambda row: -row[1]["cpu"]):
        terminalreporter.line(f"{name:20}{sums['cpu']:14.1f}" + "".join(f"{sums[what]:14}" for what in columns[1:]))
    terminalreporter.section("dearest tests")
    for test, cpu in tests.most_common(20):
        terminalreporter.line(f"{cpu:8.2f} {test}")
    terminalreporter.section("longest tests, in seconds of wall time")
    for test, wall in waits.most_common(5):
        terminalreporter.line(f"{wall:8.1f} {test}")
