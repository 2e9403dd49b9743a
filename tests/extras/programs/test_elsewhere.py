"""Programs that run in another place, which a command reaches: here a process without anything of this one's environment."""

import shutil
import sys

import pytest
from conftest import ROOT
from helpers.attempts import confinable

from grpo.extras.programs import elsewhere
from grpo.extras.programs.elsewhere import run_by_command, run_in
from grpo.extras.programs.programs import code_verdict
from grpo.extras.programs.sandbox import ProgramLimits, UnitTests
from grpo.system.errors import UserError
from tasks.code import passes

THERE = f"env -i -C / PYTHONPATH={ROOT} {sys.executable} -m grpo.extras.programs.elsewhere"
ROWS = {"test_list": [["assert double(4) == 8"]] * 3, "test_imports": [[]] * 3}
ANSWERS = [f"```python\n{text}\n```" for text in ("def double(x): return 2 * x", "def double(x): return x", "1 +")]
ODD = '{"ending": 3, "stdout": "", "stderr": "", "seconds": 0, "confinement": []}'
pytestmark = pytest.mark.skipif(not confinable(), reason="the platform cannot confine a program")


def test_a_program_ends_there_as_it_ends_here():
    run = run_in(THERE)
    tests = UnitTests("assert f('\\udcff') == 1", ("f",))
    assert run("def f(x): return len(x)", tests=tests).ending == "passed"
    assert run("def f(x): return 0", tests=tests).ending == "failed"
    assert run("while True: pass", ProgramLimits(seconds=1)).ending == "timeout"
    result = run("print(input() * 4)", ProgramLimits(seconds=20, output=8), stdin="éé")
    assert (result.ending, result.stdout) == ("passed", "\ufffdééé\n") and result.confinement[-1] == "limits"
    verdict = code_verdict(ANSWERS[0], {"test_list": ROWS["test_list"][0]}, run=run)
    assert verdict.outcome == "right"


def test_a_reward_names_the_place(tmp_path):
    """By a command, or by a function of the user's in the form of `run_program`."""
    (tmp_path / "mine.py").write_text(
        "from grpo.extras.programs.sandbox import Result\n"
        "def run(program, limits, unconfined, tests, stdin=None):\n"
        "    return Result('passed' if 'return x' in program else 'failed', '', '', 0.0, ())\n"
    )
    assert [reward.value for reward in passes(ANSWERS, sandbox=THERE, **ROWS)] == [1, 0, 0]
    assert [reward.value for reward in passes(ANSWERS, sandbox=f"{tmp_path}/mine.py:run", **ROWS)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("docker -H unix:///nowhere.sock exec -i none python -m grpo.extras.programs.elsewhere", "daemon"),
        ("nowhere --fast", "No such file or directory: 'nowhere'"),
        ("PYTHON -c 'raise SystemExit(\"no\")'", "unstarted there: no$"),
        ("echo", "it answered nothing"),
        ("echo {}", "it answered {}$"),
        (f"echo '{ODD}'", "it answered .*: 3"),
        ("PYTHON -c 'print(\"[\" * 100000)'", r"it answered \[\[\["),
    ],
)
def test_a_place_that_cannot_be_reached_is_one_line(command, line):
    if command.startswith("docker") and not shutil.which("docker"):
        pytest.skip("docker is not installed")
    with pytest.raises(UserError, match=line) as error:
        passes(ANSWERS, sandbox=command.replace("PYTHON", sys.executable), **ROWS)
    assert "\n" not in str(error.value)


def test_a_job_that_is_lost_has_an_unknown_reward(monkeypatch):
    """After the first answer, a place that fails is not the policy's fault."""
    result = run_by_command("false", "")
    assert (
        result.ending == "unstarted"
        and code_verdict(ANSWERS[0], {"test_list": []}, run=lambda *_: result).outcome == "timeout"
    )
    monkeypatch.setattr(elsewhere, "START_SECONDS", 0)
    silent = run_by_command("sleep 60", "", ProgramLimits(seconds=0.1))
    assert (silent.ending, silent.stderr, silent.seconds) == ("unstarted", "there was no answer in 0.2 s", 0.2)
