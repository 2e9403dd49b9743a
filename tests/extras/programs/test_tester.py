"""The tester and the candidate: what passes between them, and what the candidate can reach of the tester."""

import datetime
import math
from collections import Counter, OrderedDict, deque, namedtuple
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from helpers.attempts import confinable

from grpo.extras.programs import sandbox
from grpo.extras.programs.exchange import DEEPEST, Peer, Remote, decode, encode
from grpo.extras.programs.programs import code_verdict, functions_of
from grpo.extras.programs.sandbox import ProgramLimits, UnitTests, run_program
from grpo.extras.programs.tricks import tricks
from tasks.code import passes

needs_sandbox = pytest.mark.skipif(not confinable(), reason="the platform cannot confine a program")


def run(program: str, tests: str, seconds: float = 5.0):
    return run_program(program, ProgramLimits(seconds=seconds), tests=UnitTests(tests, functions_of(tests)))


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -7, -(2**300), 1.5, math.inf, -0.0, 2 + 3j, "é\ud800\n", b"\x00;", [], [[1], (2, "x")], {1, 2},
        frozenset({(1,)}), {"a": [1], 2: None}, range(2, 9, 3), bytearray(b"ab"), Fraction(1, 3), Decimal("1.50"),
        deque([1, 2], 3), datetime.date(2020, 2, 29), datetime.timedelta(1, 2, 3), int, list,
    ],
)  # fmt: skip
def test_plain_data_are_copied(value):
    copy = decode(encode(value))
    assert copy == value and type(copy) is type(value) and repr(copy) == repr(value)
    assert decode(encode(10**5000)) == 10**5000  # more digits than Python prints


def test_subclasses_become_what_they_extend():
    class Equal(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    point = namedtuple("point", "x y")(1, 2)
    for value, plain in (
        (Equal(7), 7),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (point, (1, 2)),
    ):
        copy = decode(encode(value))
        assert copy == plain and type(copy) is type(plain)
    assert math.isnan(decode(encode(math.nan)))


def test_bytes_of_another_make_no_object():
    for data in (
        b"",
        b"?",
        b"i;",
        b"i12",
        b"s9;abc",
        b"l3;NN",
        b"d1;N",
        b"e1;l0;",
        b"xs9;os.systemt1;s2;id",
        b"neval;",
        b"xs18;fractions.Fractiont1;s11;1e999999999",
        b"NN",
    ):
        with pytest.raises(Exception, match=r".*"):
            decode(data, Peer(0, 0, {}, bool))
    for data in (b"r1;", b"l1;" * 5000 + b"N"):
        with pytest.raises((KeyError, RecursionError)):
            decode(data, Peer(0, 0, {}, bool))
    deep = []
    for _ in range(DEEPEST + 2):
        deep = [deep]
    with pytest.raises(ValueError, match="containers"):
        encode(deep)
    assert (
        decode(b"o1;") != decode(b"o1;") and not isinstance(decode(b"o1;"), int) and isinstance(decode(b"o1;"), Remote)
    )


def test_the_names_that_tests_leave_to_the_program():
    assert functions_of("import math\nassert math.isclose(area(2), 3.0) and sorted(f(1)) == [x for x in LIST]") == (
        "LIST",
        "area",
        "f",
    )
    assert functions_of("assert sum(10, 15) == 6") == ("sum",)
    assert functions_of("def check(f):\n    for x in range(3): assert f(x) == abs(x)\ncheck(g)") == ("g",)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(x): return x + 1", "for n in range(50): assert f(n) == n + 1"),
        (
            "def f(x): raise KeyError(x)",
            "try: f(3)\nexcept KeyError as error: assert '3' in str(error)\nelse: assert False",
        ),
        ("class E(ValueError): pass\ndef f(): raise E", "try: f()\nexcept ValueError: pass\nelse: assert False"),
        ("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None and x == [1, 2]"),
        ("def f(x): x['a'] = 1", "x = {}\nf(x)\nassert x == {'a': 1}"),
        ("def f(g, x): return g(g(x))", "assert f(lambda x: 3 * x, 2) == 18"),
        ("def f(x): return sum(x)", "assert f(i for i in range(4)) == 6"),
        ("def f(x):\n    for i in range(x): yield i", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
        ("def f(x): return lambda y: x + y", "assert f(2)(3) == 5"),
        (
            "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n    def total(self): return self.a + self.b\n"
            "def f(pairs): return max(pair.b for pair in pairs)",
            "pair = Pair(1, 5)\nassert pair.total() == 6 and f([pair, Pair(2, 3)]) == 5\npair.a = 9\nassert pair.total() == 14",
        ),
        ("def f(*, self, operation): return self - operation", "assert f(self=5, operation=2) == 3"),
        ("def f(kind, x): return isinstance(x, kind)", "assert f(int, 3) and not f(str, 3)"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("print('hello')\nf = len", "assert f([1, 2]) == 2"),
        ("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
    ],
)
def test_tests_run_outside_as_they_would_inside(program, tests):
    result = run(program, tests)
    assert result.passed and "seccomp" in result.confinement, result
    assert result.stdout == "hello\n" * ("hello" in program)


@needs_sandbox
def test_tests_that_cannot_run_from_outside_pay_nothing_and_say_so():
    row = {"test_list": ["class Own: pass", "assert f(Own()) is None"]}
    verdict = code_verdict("```python\ndef f(x): pass\n```", row)
    assert (verdict.outcome, verdict.result.ending) == ("error", "untestable") and "type Own" in verdict.result.stderr
    (reward,) = passes(["```python\ndef f(x): pass\n```"], **{name: [value] for name, value in row.items()})
    assert math.isnan(reward.value) and reward.outcome == "error"
    assert code_verdict("```python\nf = 1\n```", {"test_list": ["assert f =="]}).outcome == "error"


@needs_sandbox
def test_the_candidate_cannot_reach_the_tester_or_the_tests():
    seen = """
import os, sys
def f(x):
    found = []
    for path in (f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/fd", f"/proc/{os.getppid()}/cmdline", "/proc/self/mem"):
        try: open(path, "rb").read(1); found.append(path)
        except OSError: pass
    for number in (0, 15, 9):
        try: os.kill(os.getppid(), number); found.append(number)
        except OSError: pass
    for call in (os.fork, lambda: os.wait(), lambda: os.execv("/bin/true", ["true"])):
        try: call(); found.append("call")
        except OSError: pass
    open_files = 0
    for n in range(64):
        try: os.fstat(n); open_files += 1
        except OSError: pass
    text = b"".join(os.pread(n, 1 << 20, 0) for n in (0, 1, 2))
    return found, open_files, b"secret words" in text, sys.argv, sorted(os.environ)
"""
    names = ["HOME", "LANG", "PATH", "PYTHONHASHSEED", "TMPDIR"]
    result = run(seen, f"'secret words'\nassert f(1) == ([], 5, False, [''], {names})")
    assert result.passed, result.stderr


@needs_sandbox
def test_nothing_outlives_a_judged_program(monkeypatch):
    """Neither a zombie nor a process, whether the candidate ends, is killed, or never answers."""
    start, started = sandbox._start, []
    monkeypatch.setattr(sandbox, "_start", lambda *args, **files: started.append(start(*args, **files)) or started[-1])
    for program, ending in (
        ("def f(x): return 2", "passed"),
        ("import os\ndef f(x): os._exit(0)", "failed"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("def f(x):\n    for i in range(2000): open(str(i), 'w').close()\n    while True: pass", "disk"),
        ("f = bytearray(10**10)", "memory"),
    ):
        assert run(program, "assert f(1) == 2", seconds=0.5 if ending == "timeout" else 10).ending == ending, program
    assert run("def f(x): return x", "while True: f(1)", seconds=0.3).ending == "timeout"
    assert len(started) == 7 and not sessions() & {process.pid for process in started}


def sessions() -> set[int]:
    """Return the sessions of all processes, zombies too. Each tester begins one."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            found.add(int(entry.read_text().rpartition(")")[2].split()[3]))
    return found


@needs_sandbox
def test_marks_of_tricks():
    assert tricks("import ctypes") == {"ctypes"} and tricks("from gc import get_objects as g") == {"gc"}
    assert tricks("class A:\n    def __eq__(self, other): return True") == {"equality"}
    assert tricks("import sys\ngetattr(sys, '_getframe')().f_back") == {"frames"}
    assert tricks("import math\nmath.isclose = print") == {"patch"} == tricks("abs = len")
    assert tricks("def sum(a, b): return a", ("sum",)) == set() == tricks("def f(x):\n    sum = x\n    return sum")
    assert tricks("sys.excepthook = f") == {"hooks"} and tricks("def (") == set()
    row = {"test_list": ["assert f(1) == 1"]}
    texts = ["```python\nimport ctypes\nf = abs\n```", "```python\nf = abs\n```", "no program"]
    rewards = passes(texts, test_list=[row["test_list"]] * 3)
    assert [(reward.value, reward.parts["tricks"]) for reward in rewards] == [(1, 1), (1, 0), (0, 0)]
