"""Programs judged by cases: which outputs are equal, which rows are read, and what a program can gain by deceit."""

import base64
import json
import pickle
import zlib
from dataclasses import replace

import pytest
from helpers.attempts import confinable
from helpers.episodes import said
from helpers.rows import write

from grpo.extras.programs.cases import Case, cases_of, run_case, same_output
from grpo.extras.programs.programs import code_verdict
from grpo.extras.programs.sandbox import ProgramLimits, Result, run_program
from grpo.system.errors import UserError
from tasks.code import Cases

needs_sandbox = pytest.mark.skipif(not confinable(), reason="the platform cannot confine a program")
LIMITS = ProgramLimits(seconds=20, memory_mb=256, disk_mb=2)


def test_outputs_are_equal_by_the_rule_of_livecodebench():
    equal = (
        ("3\n", "3"), ("  3 \n\n", "3"), ("1 2  \n 3", "1 2\n3\n"), ("1.50", "1.5"), ("1e2", "100.0"), ("01 2.0", "1 2"),
        ("YES\r\nNO\r\n", "YES\nNO"), ("", "\n"), ("a  b", "a  b"), ("1   2", "1 2.0"), ("nan", "nan"),
    )  # fmt: skip
    unlike = (
        ("4", "3"), ("1\n2", "1 2"), ("1 2", "1\n2"), ("1\n\n2", "1\n2"), ("yes", "YES"), ("a  b", "a b"), ("1 2 3", "1 2"),
        ("0.3333333", "0.3333334"), ("50000000000000001", "50000000000000000"), ("nan", "NaN"), ("inf", "infinity"),
        ("sNaN", "1"), ("x 1.0", "x 1"), ("", "0"), ("1e999999999", "1e999999998"), ("9" * 10**6 + "1", "9" * 10**6 + "2"),
    )  # fmt: skip
    assert [pair for pair in equal if not same_output(*pair)] == []
    assert [pair for pair in unlike if same_output(*pair)] == []


class Runs:
    def __reduce__(self):
        return str, ("[]",)


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_the_rows_of_four_datasets_are_read():
    both = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", "8"]]}
    scripts = [Case("1 2\n", "3\n"), Case("3\n4", "7\n8")]
    assert (
        cases_of([json.dumps(both)]) == cases_of([both]) == cases_of([json.dumps({**both, "fn_name": None})]) == scripts
    )
    called = {"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "add"}
    assert cases_of([called]) == [Case([1, [2]], [[3], 3], "add")]
    public, private = (json.dumps([{"input": x, "output": x, "testtype": "stdin"}]) for x in ("5", "6"))
    assert cases_of([public, packed(private)], "{}") == [Case("5", "5"), Case("6", "6")]
    of_class = json.dumps([{"input": '[1]\n"a"', "output": "[true]", "testtype": "functional"}])
    assert cases_of([of_class], '{"func_name": "f"}') == [Case([[1], "a"], [[True]], "f")]
    plain = [
        {"type": "stdin_stdout", "input": "1", "output": "2"},
        {"type": "function_call", "fn_name": "g", "input": [1], "output": 2},
    ]
    assert cases_of([plain, None, ""]) == [Case("1", "2"), Case([1], [2], "g")]
    for bad in (
        "x",
        "[1]",
        3,
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"]},
        of_class,
        packed(Runs()),
        packed(1),
        [{"input": "1"}],
    ):
        with pytest.raises(ValueError, match=r"."):
            cases_of([bad])


SUM = [Case("1 2\n", "3\n"), Case("30 4\n", "34\n")]
ADD = "a, b = map(int, input().split())\n"
PROGRAMS = {  # program: (outcome, ending)
    ADD + "print(a + b)": ("right", "passed"),
    "def main():\n    print(sum(map(int, input().split())))\n\nif __name__ == '__main__':\n    main()": ("right", "passed"),
    "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))\nsys.exit(main) if 0 else exit()": ("right", "passed"),
    "import os, sys, threading\nthreading.stack_size(2**26)\nn = os.fstat(0).st_size\n"
    "threading.Thread(target=lambda: print(sum(map(int, os.read(0, n).split())))).start()": ("right", "passed"),
    "import atexit, io, sys\nout = io.StringIO()\natexit.register(lambda: sys.stdout.write(out.getvalue()))\n"
    "print(sum(int(x) for line in open('/dev/stdin') for x in line.split()), file=out)": ("right", "passed"),
    ADD + "print(3)": ("wrong", "failed"),
    ADD + "print(34)": ("wrong", "failed"),  # right in the last case alone
    ADD + "print(a + b)\n1 / 0": ("wrong", "failed"),
    ADD + "print(a + b, flush=True)\nimport os; os._exit(0)": ("wrong", "failed"),
    "exit(0)": ("wrong", "failed"),
    ADD + "print('x' + '\\n' * 5000, a + b)": ("wrong", "failed"),
    ADD + "print(f'3\\n34')": ("wrong", "failed"),
    ADD + "print(a + b)\nwhile True: pass": ("wrong", "timeout"),
    ADD + "print(a + b)\nwhile True: print(10_000 * 'no')": ("wrong", "failed"),  # more text than is kept, at once
    "x = bytearray(10**9)": ("wrong", "memory"),
    "import os\nfor n in range(64):\n    try: os.write(n, b'34passed')\n    except OSError: pass": ("wrong", "failed"),
    "import gc, sys\nfor x in gc.get_objects():\n    if isinstance(x, dict) and 'wanted' in x: print(x['wanted'])": (
        "wrong", "failed"),
    "import os\nfor n in range(3):\n    try: print(os.pread(n, 99, 0))\n    except OSError: pass": ("wrong", "failed"),
}  # fmt: skip


@needs_sandbox
def test_scripts_are_right_by_what_they_print_and_gain_nothing_else():
    found = {}
    for program, (_, ending) in PROGRAMS.items():
        limits = replace(LIMITS, seconds=0.7) if ending == "timeout" else LIMITS
        verdict = code_verdict(f"```python\n{program}\n```", {"cases": SUM}, limits)
        found[program] = (verdict.outcome, verdict.result.ending)
        assert len(verdict.result.stdout) <= LIMITS.output
    assert found == PROGRAMS
    assert code_verdict("```python\npass\n```", {"cases": []}).outcome == "error"  # the row's fault
    seen = run_program("import sys\nprint(__name__, sys.argv, [*sys.modules['__main__'].__dict__])", stdin="34")
    assert "34" not in seen.stdout and seen.stdout.startswith("__main__ [''] ['__name__'")


@needs_sandbox
def test_functions_are_called_and_judged_outside(tmp_path):
    row = {
        "question": "Pair them.", "starter_code": "class Solution:\n    def pair(self, x: List[int], y) -> list:",
        "metadata": '{"func_name": "pair"}',
        "public_test_cases": json.dumps([{"input": "[1]\n2", "output": "[[1], 2]", "testtype": "functional"}]),
    }  # fmt: skip
    write(tmp_path / "train.jsonl", [row])
    task = Cases(str(tmp_path), "question", ["public_test_cases"])
    assert "Complete this code" in task.messages(row)[0].content
    method = f"```python\n{row['starter_code']}\n        %s\n```"
    answers = (
        method % "return x, y",
        method % "return [x, y, 0]",
        method % "print([[1], 2])",
        "def pair(x, y): return [x, y]",
        "from __future__ import annotations\ndef pair(x: List, y): return [x, y]",
    )
    equal = method % "return type('E', (), {'__eq__': lambda *_: True})()"
    rewards = task.score_group(row, [said(text) for text in (*answers, equal)])
    assert [(one.value, one.outcome) for one in rewards] == [
        (1, "right"),
        (0, "wrong"),
        (0, "wrong"),
        (1, "right"),
        (1, "right"),
        (0, "wrong"),
    ]


def test_a_row_whose_cases_cannot_be_read_is_refused_at_the_start(tmp_path):
    for bad, told in (
        ("[1]", r"the cases in tests cannot be read \(these are no cases"),
        ("[]", "there is no case in tests"),
    ):
        write(tmp_path / "train.jsonl", [{"problem": "p", "tests": bad}])
        with pytest.raises(UserError, match=told):
            Cases(str(tmp_path), "problem", ["tests"]).examples("train")
    write(tmp_path / "train.jsonl", [{"question": "p", "inputs": ["1"], "outputs": ["1"]}])
    task = Cases(str(tmp_path), "question", ["inputs", "outputs"])
    assert task.columns(task.examples("train")[0])["cases"] == [Case("1", "1")]
    assert "reads standard input" in task.messages(task.examples("train")[0])[0].content


@pytest.mark.parametrize(("kept", "shown"), [(0, ""), (2, "23"), (9, "123")])
def test_the_end_of_what_a_program_prints_is_kept(kept, shown):
    def run(*_, **__):
        return Result("passed", "123", "", 0.0, ())

    result = run_case("print(123)", Case(input="", expected="123"), ProgramLimits(output=kept), run=run)
    assert (result.ending, result.stdout) == ("passed", shown)
