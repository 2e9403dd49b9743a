"""The sandbox with real programs, and with real attempts to escape from it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import REAL_DATA, ROOT
from helpers.attempts import confinable
from helpers.rows import read
from helpers.time_limits import crowded

from grpo.extras.programs import sandbox_child
from grpo.extras.programs.programs import assemble, code_verdict, extract_continuation, extract_program
from grpo.extras.programs.sandbox import ProgramLimits, UnitTests, _exceeds, run_program
from grpo.system.errors import UserError

HUMANEVAL, MBPP = REAL_DATA / "humaneval_20.jsonl", REAL_DATA / "mbpp_sanitized_30.jsonl"
real = pytest.mark.skipif(not HUMANEVAL.exists() or not MBPP.exists(), reason="no HumanEval and MBPP here")
ROW = {"test_list": ["assert double(2) == 4"]}


if not confinable():
    pytest.skip("the platform cannot confine a program", allow_module_level=True)


def fenced(code: str) -> str:
    return f"<think>```python\nno\n```</think>Here it is:\n```python\n{code}\n```\nDone."


def running(folder: str) -> list[str]:
    """Return the sandboxed processes whose folder is inside this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:  # it ended, or is another user's
            continue
        if sandbox_child.__file__.encode() in line and folder.encode() in line:
            found.append(entry.parent.name)
    return found


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path_factory):
    """A folder for temporary files. At the end it has no files, and no process has a folder in it."""
    tmp_path_factory.getbasetemp()  # pytest's own folder, made on first use, is elsewhere
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder
        assert os.listdir(folder) == [] and running(folder) == []


# programs


@real
@pytest.mark.slow
def test_canonical_solutions_pass_as_code_and_as_a_continuation():
    humaneval, mbpp = read(HUMANEVAL), read(MBPP)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.map(lambda row: code_verdict(fenced(row["prompt"] + row["canonical_solution"]), row), humaneval)
        body = pool.map(lambda row: code_verdict(fenced(row["canonical_solution"]), row), humaneval)
        more = "\nclass Other:\n    pass\n"  # base models continue
        continued = pool.map(
            lambda row: code_verdict(row["canonical_solution"] + more, row, continuation=True), humaneval
        )
        short = pool.map(lambda row: code_verdict(fenced(row["code"]), row), mbpp)
        for verdicts, number in ((whole, 20), (body, 20), (continued, 20), (short, 30)):
            assert [verdict.outcome for verdict in verdicts] == ["right"] * number


@real
@pytest.mark.slow
def test_the_solution_of_another_row_is_wrong():
    humaneval, mbpp = read(HUMANEVAL), read(MBPP)
    cases = [
        (row["canonical_solution"], other) for row, other in zip(humaneval, humaneval[1:] + humaneval[:1], strict=True)
    ]
    cases += [(row["code"], other) for row, other in zip(mbpp, mbpp[1:] + mbpp[:1], strict=True)]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda case: code_verdict(fenced(case[0]), case[1], ProgramLimits(seconds=3)), cases))
    assert [verdict.outcome for verdict in verdicts] == ["wrong"] * 50


def test_the_last_python_block_after_the_thoughts_counts():
    assert extract_program("```python\na = 1\n```\n```python\nb = 2\n```") == "b = 2\n"
    assert extract_program("```python\na = 1\n```\nwhich prints\n```\n1\n```") == "a = 1\n"
    assert extract_program("```\na = 1\n```\n```text\n1\n```") == "a = 1\n"
    assert extract_program("```python\r\na = 'x\u2028y'\r\n```") == "a = 'x\u2028y'\n"
    assert extract_program("```py\nx\n```</think>```") is None
    assert extract_program("<think>```python\nx</think>\n```Python\r\ny\r\n```") == "y\n"
    assert extract_program("1. so:\n   ```python\n   if a:\n       b\n   ```") == "if a:\n    b\n"
    assert extract_program("````python\n'''\n```\n'''\n````") == "'''\n```\n'''\n"
    for none in (
        "",
        "a = 1",
        "```python\na = 1",
        "```python\na = 1\n```\n```python\nb =",
        "```python\n\n```",
        "```sql\na\n```",
    ):
        assert extract_program(none) is None


def test_a_continuation_ends_where_the_function_does():
    assert extract_continuation("    return 1\n\ndef more():\n") == "    return 1\n"
    assert (
        extract_continuation("    # so\n    if a:\n        return 1\nprint(f(1))")
        == "    # so\n    if a:\n        return 1"
    )
    assert extract_continuation("\n# no body\n") is None


def test_a_verdict_says_why():
    right, wrong, none = (
        code_verdict(text, ROW) for text in (fenced("double = lambda x: 2 * x"), fenced("double = abs"), "4")
    )
    assert (right.outcome, wrong.outcome, none.outcome) == ("right", "wrong", "no_answer")
    assert (right.result.ending, wrong.result.ending, none.result) == ("passed", "failed", None)
    assert "AssertionError" in wrong.result.stderr
    for swallow in ("if 0: \\", "double = abs; x = \\", "x = '''", 'x = """', "if 0:", "("):
        assert code_verdict(fenced(swallow), ROW).outcome == "wrong"
    endless = code_verdict(fenced("while True:\n    pass"), ROW, ProgramLimits(seconds=0.3))
    assert (endless.outcome, endless.result.ending) == ("wrong", "timeout")
    greedy = code_verdict(fenced("double = bytearray(10**10)"), ROW)
    assert (greedy.outcome, greedy.result.ending) == ("wrong", "memory")
    with pytest.raises(UserError, match="need HumanEval"):
        assemble({"question": "?"}, "pass")


# environment of a program


def test_a_program_gets_the_standard_library_threads_and_a_folder():
    result = run_program("""
import asyncio, collections, ctypes, datetime, decimal, hashlib, json, os, re, sqlite3, ssl, sys, tempfile, threading
async def three():
    await asyncio.sleep(0.01)
    return 3
assert asyncio.run(three()) == 3
with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "a"), "w") as file:
    file.write("x" * 1000)
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
assert sys.stdin.read() == "" and sys.argv == [""] and __name__ == "__main__" and os.listdir() == []
print(sorted(os.environ))
""")
    assert result.passed, result.stderr
    assert result.stdout == "thread\n['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']\n"


def test_the_parents_files_are_not_inherited(tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        result = run_program(
            "import os\nfor n in range(4096):\n    try: os.fstat(n); print(n, end=' ')\n    except OSError: pass"
        )
    assert len(result.stdout.split()) == 5 and result.stdout.startswith("0 1 2 ")  # and two pipes to the judge


def test_only_the_end_of_the_text_is_passing():
    for early in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit(0)"):
        assert run_program(early + "\nassert False").ending == "failed"
    assert run_program("import os\nos.kill(os.getpid(), 9)").ending == "failed"
    guess = (
        "import os\nfor n in range(4096):\n    try: os.write(n, b'passed' * 10)\n    except OSError: pass\nos._exit(0)"
    )
    assert run_program(guess).ending == "failed"
    frames = """
import gc, os, sys
frame, found = sys._getframe(), list(gc.get_objects())
while frame:
    found += [*frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
for value in found:
    if type(value) in (bytes, bytearray) and len(value) == 32:
        for n in range(3, 64):
            try: os.write(n, value)
            except OSError: pass
os._exit(0)
"""
    assert run_program(frames).ending == "failed"
    assert run_program(
        "import atexit, threading, time\natexit.register(print, 1)\nthreading.Thread(target=time.sleep, args=(9,)).start()"
    )
    assert run_program("1 +").ending == run_program("\0").ending == run_program("\ud800").ending == "failed"
    assert run_program("").ending == "passed"


# forbidden actions


def stopped(program: str, error: str = "PermissionError", limits: ProgramLimits | None = None) -> None:
    result = run_program(program, limits)
    assert result.ending == "failed" and error in result.stderr, result


def test_a_fork_bomb():
    stopped("import os\nwhile True:\n    os.fork()")
    stopped("import subprocess\nsubprocess.run(['/bin/true'])")
    stopped("import os\nos.execv('/bin/true', ['true'])", "OSError")
    stopped("import multiprocessing\nmultiprocessing.Process(target=print).start()")
    threads = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    assert run_program(threads, ProgramLimits(seconds=30)).ending in ("failed", "memory")


def test_endless_loops():
    for program in (
        "while True: pass",
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntry: os.setsid()\nexcept OSError: pass\n"
        "try: os.fork()\nexcept OSError: pass\nwhile True: time.sleep(1)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ):
        result = run_program(program, ProgramLimits(seconds=0.5))
        assert result.ending == "timeout" and result.seconds >= 0.5
    deaf = run_program("import os\nos.closerange(0, 64)\nwhile True: pass", ProgramLimits(seconds=60))
    assert deaf.ending == "failed"  # it cannot answer, and nobody waits until its time is over


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's statistics of threads")
def test_waiting_for_a_core_does_not_count():
    """The program shares a core with five others, so a quarter of a second of computing takes it a second and a half."""
    program = "import time\ndef f(end):\n    while time.process_time() < end: pass\nf(0.15)"
    with crowded():
        result = run_program(program, ProgramLimits(seconds=0.75), tests=UnitTests("f(0.25)", ("f",)))
    assert result.passed, result


def test_memory_and_recursion():
    assert run_program("x = bytearray(10 * 2**30)").ending == "memory"
    assert run_program("x = []\nwhile True: x.append(bytearray(2**20))").ending == "memory"
    stopped("def f(): f()\nf()", "RecursionError")
    crash = run_program(
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    )
    assert crash.ending in ("failed", "memory")
    assert run_program("(" * 10**5).ending == "failed"


def test_files_outside(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    os.chmod(tmp_path, 0o777)
    os.chmod(secret, 0o666)
    for attempt in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w').write('gone')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.unlink({str(secret)!r})",
        f"import os; os.rename({str(secret)!r}, 'mine')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import os; os.listdir({str(Path.home())!r})",
        f"import os; os.listdir({tempfile.gettempdir()!r})",
        "import os; open(os.__file__, 'a')",
        "open('/etc/passwd')",
        "open('/proc/self/maps')",
    ):
        stopped(attempt)
    for attempt in (
        f"import os; os.chmod({str(secret)!r}, 0)",
        f"import os; os.utime({str(secret)!r}, (0, 0))",
        f"import os; os.truncate({str(secret)!r}, 0)",
        f"import os; os.link({str(secret)!r}, 'mine')",
        f"import os; os.symlink({str(secret)!r}, 'mine')",
        f"import os; os.open({str(secret)!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.mkfifo('pipe')",
    ):
        stopped(attempt, "Error")
    assert (
        secret.read_text() == "42" and os.stat(secret).st_mode & 0o777 == 0o666 and os.listdir(tmp_path) == ["secret"]
    )


def test_the_parent(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    for name in ("environ", "cmdline", "maps", "mem"):
        stopped(f"import os\nprint(open(f'/proc/{{os.getppid()}}/{name}', 'rb').read(1))")
    caught = []
    before = signal.signal(signal.SIGIO, lambda *_: caught.append(1))
    try:
        stopped("import os\nos.kill(os.getppid(), 29)")
        stopped("import os\nos.killpg(0, 29)")
        stopped("import os\nos.kill(-1, 29)")
        stopped("import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 29)", "OSError")
        stopped("import os, fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, os.getppid())")  # F_SETOWN, then O_ASYNC
        stopped("import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))")
    finally:
        signal.signal(signal.SIGIO, before)
    assert caught == []


def test_raw_system_calls():
    """ptrace, mount, unshare, bpf, keyctl, io_uring_setup, userfaultfd, memfd_create, setns, process_vm_readv, clone3, setuid"""
    numbers = {"x86_64": (101, 165, 272, 321, 250, 425, 323, 319, 308, 310, 435, 105)}
    numbers["aarch64"] = (117, 40, 97, 280, 219, 425, 282, 279, 268, 270, 435, 146)
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
zeros = [ctypes.c_long(0)] * 5
print({{(libc.syscall(ctypes.c_long(n), *zeros), ctypes.get_errno()) for n in {numbers[os.uname().machine]}}})
print(libc.syscall(ctypes.c_long({56 if os.uname().machine == "x86_64" else 220}), ctypes.c_long(0x10000000 | 17)))
"""
    result = run_program(program)
    assert (result.stdout, result.ending) == ("{(-1, 38)}\n-1\n", "passed")  # 38: ENOSYS


def judge(machine: str, arch: int, number: int, *arguments: int) -> int:
    """Return the filter's verdict on a system call of process 7, from a small BPF machine."""
    words = [number, arch, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    at, value = 0, 0
    code = sandbox_child.seccomp_filter(machine, pid=7)
    assert len(code) <= 4096 and all(true < 256 and false < 256 for _, true, false, _ in code)
    while True:
        operation, true, false, k = code[at]
        at += 1
        if operation == 0x20:
            value = words[k // 4]
        elif operation == 0x54:
            value &= k
        elif operation == 0x15:
            at += true if value == k else false
        else:
            return k


def test_the_filter_on_both_machines():
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    intel, arm = ("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)
    cases = {
        allow: [(0,), (56, 0x3D0F00), (62, 7, 15), (72, 1, 1030), (2, 9, 0o1102), (257, 0, 9, 0), (53, 1, 1 | 0o4000)],
        eperm: [
            (56, 17), (56, 0x10010000), (62, 8), (62, 0), (62, 0xFFFFFFFF), (234, 8), (302, 8), (72, 1, 8),
            (72, 1, 10),
        ],
        enosys: [(57,), (58,), (59,), (41, 2, 1), (42,), (101,), (435,), (165,), (0x40000000,), (9999,)],
    }  # fmt: skip
    cases[eperm] += [(2, 9, 0o1000), (257, 0, 9, 0o1000), (257, 0, 9, 0o1003), (16, 0, 0x5412), (53, 2, 1), (53, 1, 2)]
    cases[eperm] += [(44, 3, 9, 1, 0, 1 << 40)]
    for verdict, calls in cases.items():
        assert [judge(*intel, *call) for call in calls] == [verdict] * len(calls)
    cases = {
        allow: [(63,), (220, 0x3D0F00), (129, 7), (25, 1, 3), (56, 0, 9, 0), (206, 3, 9, 1, 0, 0), (261, 0)],
        eperm: [
            (220, 17), (129, 8), (131, 8), (261, 8), (25, 1, 8), (56, 0, 9, 0o1000), (29, 0, 0x5412),
            (206, 3, 9, 1, 0, 1),
        ],
        enosys: [(198,), (203,), (221,), (117,), (40,), (425,), (435,), (2000,)],
    }  # fmt: skip
    for verdict, calls in cases.items():
        assert [judge(*arm, *call) for call in calls] == [verdict] * len(calls)
    assert judge("x86_64", 0x40000003, 0) == judge("aarch64", 0x40000028, 63) == kill  # 32-bit calls


def test_the_network():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        server.settimeout(0.2)
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(0.2)
        port, other = server.getsockname()[1], udp.getsockname()[1]
        stopped(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", "OSError")
        stopped(
            f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {other}))",
            "OSError",
        )
        stopped("import socket\nsocket.getaddrinfo('example.org', 80)", "gaierror")
        stopped(f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}')", "Error")
        for family in ("AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET"):
            stopped(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_RAW)", "OSError")
        stopped("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)")
        for silent in (server.accept, lambda: udp.recv(1)):
            with pytest.raises(TimeoutError):
                silent()


@pytest.mark.slow
def test_floods():
    loud = run_program("import sys\nfor i in range(10**9): print('x' * 1000)", ProgramLimits(seconds=5, disk_mb=2))
    assert loud.ending == "failed" and loud.stdout.endswith("xxx") and "File too large" in loud.stderr
    assert len(loud.stdout) == len("x" * 4096)
    stopped("open('big', 'wb').write(bytes(3 * 2**20))", "File too large", ProgramLimits(disk_mb=2))
    many = "import itertools\nfor i in itertools.count():\n    open(f'{i}', 'wb').write(bytes(2**20))"
    assert run_program(many, ProgramLimits(disk_mb=4)).ending == "disk"
    assert run_program("import itertools\nfor i in itertools.count(): open(f'{i}', 'w').close()").ending == "disk"
    assert (
        run_program("import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')").ending == "disk"
    )  # deeper than any path
    assert (
        run_program(
            "import os\nos.makedirs('a/b/c')\nopen('a/b/c/d', 'w')\nos.mkdir('e', 0)\nos.mkdir('f', 0o300)"
        ).ending
        == "passed"
    )


@pytest.mark.slow
def test_eight_threads_at_once():
    programs = [
        "assert sum(range(100)) == 4950",
        "assert False",
        "import sys; sys.exit(0)",
        "x = bytearray(10**10)",
    ] * 16
    with ThreadPoolExecutor(8) as pool:
        endings = [result.ending for result in pool.map(run_program, programs)]
    assert endings == ["passed", "failed", "failed", "memory"] * 16


def test_a_program_ends_with_its_parent(here):
    code = """
from grpo.extras.programs.sandbox import ProgramLimits, run_program
run_program("import time; time.sleep(600)", ProgramLimits(seconds=600))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    until(lambda: len(running(here)) == 2)  # judge and candidate
    parent.kill()
    parent.wait()
    until(lambda: running(here) == [])
    subprocess.run(["rm", "-rf", *map(str, Path(here).iterdir())], check=True)  # no process was left to remove it


def test_without_landlock_a_program_runs_only_unconfined():
    """In a process whose kernel has no Landlock."""
    code = """
from grpo.extras.programs import sandbox_child
from grpo.extras.programs.sandbox import ProgramLimits, UnitTests, run_program
from grpo.system.errors import UserError
sandbox_child.checked("no_new_privs", sandbox_child.libc.prctl, 38, 1)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x00050000 | 38), (6, 0, 0, 0x7FFF0000)]
sandbox_child.seccomp(code)
try:
    run_program("")
except UserError as error:
    print(error)
result = run_program("print(1)", unconfined=True)
print(result.ending, result.confinement, result.stdout)
print(run_program("import os, time\\nos.fork()\\ntime.sleep(60)", ProgramLimits(seconds=0.5), unconfined=True).ending)
print(run_program("import os, time\\nif os.fork() == 0: time.sleep(60)", unconfined=True).ending)
print(run_program("x = bytearray(10**10)", unconfined=True).ending)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a program cannot be confined here (Landlock: ") and "unconfined=True" in lines[0], done
    assert lines[1:] == ["passed ('limits',) 1", "", "timeout", "passed", "memory"]


def test_the_end_of_an_output_is_kept_and_the_bytes_of_a_folder_count(tmp_path):
    seen = run_program("import sys\nprint('0123456789')\nprint('abcdef', file=sys.stderr)", ProgramLimits(output=4))
    assert (seen.stdout, seen.stderr) == ("789\n", "def\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "big").write_bytes(b"x" * 2**17)
    assert _exceeds(str(tmp_path), 2**17 - 1) and not _exceeds(str(tmp_path), 2**18)


def test_limits_are_checked():
    for name, wrong in (("seconds", 0), ("seconds", float("inf")), ("memory_mb", 1), ("disk_mb", 0), ("threads", 0)):
        with pytest.raises(UserError, match=f"limits.{name}={wrong} must be a"):
            ProgramLimits(**{name: wrong})
