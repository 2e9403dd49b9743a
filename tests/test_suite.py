"""The suite's own tools: forks, a second chance for a failed test, and costs, on a few tests that are planted."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
from conftest import LISTS, ROOT, collected
from helpers.costs import BUDGET, room
from helpers.forks import wanted

PLANTED = {
    "test_one.py": """
        import os, pathlib

        def test_passes(): pass
        def test_by_chance():
            print("seen the first time")
            assert pathlib.Path("mark").exists() or pathlib.Path("mark").touch()
        def test_kills_its_process(): os._exit(3)
        def test_after_it(): pass
        def test_wrong(): assert 1 == 2
    """,
    "test_two.py": """
        import os, subprocess, sys

        def test_captures(capfd):
            os.system("echo seen")
            assert capfd.readouterr().out == "seen\\n"
        def test_computes(): subprocess.run([sys.executable, "-c", "sum(range(10**7))"])
    """,
}


@pytest.fixture
def suite(tmp_path):
    """Starts pytest with the tools on the planted tests."""
    for name, text in PLANTED.items():
        (tmp_path / name).write_text(text.replace("\n        ", "\n"))

    def start(*words: str) -> subprocess.Popen:
        plugins = ("-p", "helpers.forks", "-p", "helpers.again", "-p", "helpers.costs", "-p", "no:cacheprovider")
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
        words = (sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir=.", *plugins, "--forks=2", *words)
        return subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize(
    ("busy", "running", "forks"), [(50, 2, 3), (50, 3, 4), (50, 4, 4), (90, 3, 3), (99, 4, 3), (99, 2, 2), (90, 1, 2)]
)
def test_an_idle_machine_gets_up_to_two_more_forks_than_the_two_asked_for(busy, running, forks):
    assert wanted(busy, running, asked=2) == forks


@pytest.mark.extras
def test_the_tests_that_the_lists_name_exist():
    """Their parameters too, if all tests are collected; those of vLLM are not where it is missing."""
    whole = {name.partition("::")[0] for name in collected} if len(collected) > 3000 else ()
    for line in "\n".join(file.read_text() for file in LISTS.values()).splitlines():
        if line and not line.startswith("#"):
            file, _, name = line.partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), line
            assert file not in whole or any(test.startswith(line) for test in collected), line


@pytest.mark.extras
def test_a_file_of_nightly_tests_has_one_that_runs_for_each_change():
    """Else the list names one of its kind above it."""
    if len(collected) < 3000:
        pytest.skip("it needs the names of all tests")
    by_day = [name for name, nightly in collected.items() if not nightly]
    alone = {name.partition("::")[0] for name in collected} - {name.partition("::")[0] for name in by_day}
    for section in LISTS["nightly"].read_text().split("\n\n"):
        for named in re.findall(r"^#.*(tests/\S+::\S+)", section, re.M):
            assert any(name.startswith(named) for name in by_day), named
            alone -= {line.partition("::")[0] for line in section.splitlines()}
    assert not alone


@pytest.mark.slow
def test_a_dead_fork_costs_one_test_and_a_flaky_one_is_printed(suite):
    """The test that ended its process and the wrong one stay failed; the one that passes alone is printed with both outputs."""
    process = suite("--again")
    out = process.communicate()[0]
    assert process.returncode == 1 and "2 failed, 4 passed, 1 flaky" in out
    assert {"test_one.py: 2 passed, 3 failed", "test_two.py: 2 passed"} <= {*out.splitlines()}
    assert "test_kills_its_process ended the process that ran it: exit code 3" in out
    flaky = out.partition("FLAKY test_one.py::test_by_chance")[2].partition("short test summary")[0]
    assert "seen the first time" in flaky.partition("Alone:")[0] and "1 passed" in flaky.partition("Alone:")[2]
    assert "FLAKY test_one.py::test_wrong" not in out


def test_a_flaky_test_alone_does_not_fail_the_suite_and_children_are_counted(suite, tmp_path):
    """The sum of ten million numbers takes a tenth of a second and more, in a process that the test starts."""
    process = suite("--again", "-k", "chance or computes", "--costs=costs.jsonl")
    assert "1 passed, 5 deselected, 1 flaky" in process.communicate()[0] and process.returncode == 0
    costs = [json.loads(line) for line in (tmp_path / "costs.jsonl").read_text().splitlines()]
    (call,) = [cost for cost in costs if cost["when"] == "call" and cost["test"].endswith("test_computes")]
    assert call["cpu"] > 0.02 and call["processes"] >= 1 and "runs" not in call


def test_each_room_has_a_budget_and_one_over_it_or_without_fails_the_suite(suite, tmp_path):
    rooms = {room(str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("test_*.py")}
    assert rooms | {"all"} == {*BUDGET}
    planted = "costs.BUDGET['all'] = 0.001\ndel costs.BUDGET['tests']\n"
    (tmp_path / "conftest.py").write_text(f"from helpers import costs\n\n{planted}")
    process = suite("--budget", "-k", "computes")
    out = process.communicate()[0]
    assert "of 0.001 CPU seconds" in out and "of 0 CPU seconds" in out and process.returncode == 1


def test_a_suite_that_is_cut_off_says_what_it_ran(suite, tmp_path, monkeypatch):
    """It leaves the costs of commands to the suite that has started it."""
    (tmp_path / "kept.jsonl").write_text("")
    monkeypatch.setenv("COSTS_OF_COMMANDS", str(tmp_path / "kept.jsonl"))
    (tmp_path / "test_three.py").write_text("import time\n\ndef test_hangs(): time.sleep(100)\n")
    process = suite("test_two.py", "test_three.py")
    line = ""
    while line != "test_two.py: 2 passed\n":
        line = process.stdout.readline()
        assert line
    process.send_signal(signal.SIGTERM)
    assert "2 passed" in process.communicate()[0] and process.returncode == 2 and (tmp_path / "kept.jsonl").exists()


def test_each_file_of_tests_has_a_name_of_its_own():
    """pytest imports them by these names, and takes the second one for the first."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
