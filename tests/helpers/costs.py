"""CPU seconds of tests, by room and by test, with what they compose, train and start. `pytest --costs FILE.jsonl` writes them.

The seconds are those of the process and of the processes that it has waited for. They scatter by a tenth or two, and grow on a
busy machine; the counts do not.
"""

import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PHASES: list[dict] = []  # a line of the file for each phase of each test
COUNTS: Counter[str] = Counter()  # of this process
EVENTS = {
    "subprocess.Popen": "processes",
    "os.fork": "processes",
    "os.forkpty": "processes",
    "os.posix_spawn": "processes",
}
CALLS = [
    ("hydra._internal.config_loader_impl", "ConfigLoaderImpl", "load_configuration", "compositions"),
    ("lightning.pytorch", "Trainer", "fit", "runs"),
]
spent = 0.0  # when the phase began


def seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def room(test: str) -> str:
    """Return the folder of tests/ that a test is in."""
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="write the CPU seconds of each test to this file")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.costs:
        return
    sys.addaudithook(lambda event, _: COUNTS.update([EVENTS[event]]) if event in EVENTS else None)
    for module, holder, function, what in CALLS:
        if module in sys.modules:  # else no test uses it
            holder = getattr(sys.modules[module], holder)
            setattr(holder, function, counted(getattr(holder, function), what))


def counted(function, what: str):
    def counting(*given, **named):
        COUNTS[what] += 1
        return function(*given, **named)

    return counting


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    global spent
    spent = seconds()
    COUNTS.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global spent
    report = yield
    before, spent = spent, seconds()
    report.cost = {"cpu": round(spent - before, 4), **COUNTS}
    COUNTS.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    PHASES.append({"test": report.nodeid, "when": report.when, **getattr(report, "cost", {})})


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if not config.option.costs or not PHASES:
        return
    config.option.costs.write_text("".join(json.dumps(phase) + "\n" for phase in PHASES))
    rooms, tests = defaultdict(Counter), Counter()
    for phase in PHASES:
        rooms[room(phase["test"])].update({key: phase[key] for key in phase if key not in ("test", "when")})
        rooms[room(phase["test"])]["tests"] += phase["when"] == "call"
        tests[phase["test"]] += phase.get("cpu", 0)
    columns = ("cpu", "tests", "compositions", "runs", "processes")
    terminalreporter.section("CPU seconds by room")
    terminalreporter.line(f"{'':20}" + "".join(f"{column:>14}" for column in columns))
    for name, sums in sorted({**rooms, "all": sum(rooms.values(), Counter())}.items(), key=lambda row: -row[1]["cpu"]):
        terminalreporter.line(
            f"{name:20}" + "".join(f"{sums[column]:14.{int(column == 'cpu')}f}" for column in columns)
        )
    terminalreporter.section("dearest tests")
    for test, cpu in tests.most_common(40):
        terminalreporter.line(f"{cpu:8.2f} {test}")
