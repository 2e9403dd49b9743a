"""A person sees this on a real terminal while a program speaks through print, logging and rich, and its log has that."""

import builtins
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from helpers.terminals import Terminal, seen
from rich.text import Text

from grpo.extras.terminal import screen as screens
from grpo.extras.terminal.screen import Screen, screen
from grpo.extras.terminal.wrapping import wrapped
from grpo.system.output.console import SCREENS, busy, console

COLUMNS = 40
LINE = "memory: 0.83 GB in an update, 0.72 GB in a rollout, of 22.01 GB on cpu: weights 5.05 MB"
ROWS = ["memory: 0.83 GB in an update, 0.72 GB in", "        a rollout, of 22.01 GB on cpu:", "        weights 5.05 MB"]


class Shown:
    """The output of a program. raw: with the cursor's movements. lines: at its end, on the terminal. log: of the log file."""

    raw, lines, log = "", [], ""


@pytest.fixture
def terminal(monkeypatch, tmp_path):
    """Return what gives a program in this process a terminal, or a file, as standard output, and a log with times."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(screens, "PATIENCE", 0.05)
    monkeypatch.setattr(screens, "TICK", 0.01)

    @contextmanager
    def given(file=None):
        shown, log = Shown(), tmp_path / "train.log"
        real = Terminal(COLUMNS) if file is None else None
        out = os.fdopen(os.dup(real.end), "w") if real else file.open("w")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        with screen():
            handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(log)]
            handlers[1].setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            for handler in handlers:
                logging.getLogger().addHandler(handler)
            try:
                yield shown
            finally:
                for handler in handlers:
                    logging.getLogger().removeHandler(handler)
        assert sys.stdout is out and not SCREENS
        out.close()
        handlers[1].close()
        monkeypatch.undo()
        shown.raw = real.close() if real else file.read_text()
        shown.lines = [line for line in seen(shown.raw, COLUMNS) if line]
        shown.log = log.read_text()

    return given


def say_three() -> None:
    """Say the same through print, logging and rich."""
    print(LINE)
    logging.getLogger("grpo").warning(LINE)
    console().print(LINE, soft_wrap=True, highlight=False)


def test_lines_wrap_at_words_and_are_whole_in_the_log(terminal):
    with terminal() as shown:
        say_three()
    assert shown.lines == 3 * ROWS
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in shown.log.splitlines()] == 3 * [LINE]
    assert len(re.findall(r"^\d\d:\d\d:\d\d ", shown.log, re.MULTILINE)) == 3


def test_output_that_is_no_terminal_stays_one_line_a_message(terminal, tmp_path, monkeypatch):
    with terminal(tmp_path / "out.txt") as shown:
        monkeypatch.delenv("COLUMNS")
        say_three()
        with busy("loading the model"):
            time.sleep(0.15)
    assert shown.raw == 3 * f"{LINE}\n" and shown.log.count(LINE) == 3


def test_no_two_messages_share_a_line(terminal):
    """One waits for its end when the next one comes, on the same stream or on the other."""
    with terminal() as shown:
        print("first ...", end="", flush=True)
        logging.getLogger("grpo").warning("a warning")
        print("second ...", end="", flush=True)
        print("an error", file=sys.stderr)
        print("third ...", end="", flush=True)
        console().print("of rich")
        print("fourth ...", end="", flush=True)
        print(" done")
        sys.stderr.write("\r 1/2")  # as libraries draw their bars
        sys.stderr.flush()
        sys.stderr.write("\r 2/2")
        sys.stderr.flush()
        print("and more")
    said = [
        "first ...",
        "a warning",
        "second ...",
        "an error",
        "third ...",
        "of rich",
        "fourth ... done",
        " 2/2",
        "and more",
    ]
    assert shown.lines == said
    assert [line[9:] for line in shown.log.splitlines()] == said


def test_a_count_in_place_is_shown_at_once_and_kept_once(terminal):
    with terminal() as shown:
        there = SCREENS[-1]
        there.status = Text("1/30")
        for number in range(3):
            print(f"step {number}", end="\r")
            there.tick()
        assert (there.open, sys.stdout.rest, sys.stdout.open) == (sys.stdout, "", "step 2\r")
        print("of stderr", file=sys.stderr)
        print("bar", end="\r")
        print("   ", end="\r")  # it is removed
        assert there.open is None
        there.status = None
    assert "step 0\rstep 1\rstep 2\r" in shown.raw and shown.lines == ["step 2", "of stderr"]
    assert [line[9:] for line in shown.log.splitlines()] == ["step 2", "of stderr"]


def test_a_file_beside_a_terminal_has_what_was_said(terminal, monkeypatch):
    file = StringIO()
    with terminal() as shown, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        with screen(bars=False):
            print("one, ", end="", file=sys.stderr, flush=True)
            print("a line")
            print("two", file=sys.stderr)
    assert file.getvalue() == "one, two\n" and shown.lines == ["a line"]


def test_messages_come_above_what_changes_in_place_which_is_gone_at_the_end(terminal):
    with terminal() as shown:
        there = SCREENS[-1]
        there.status = Text("1/30  reward 0.25\nheld out  ▃")
        there.tick()
        say_three()
        now = shown_now(there)
        there.status = Text("2/30  reward 0.50\nheld out  ▃")
        there.tick()
        logging.getLogger("grpo").warning("a warning")
        there.status = None
        there.tick()
    assert now == ["1/30  reward 0.25", "held out  ▃"]
    assert shown.lines == [*3 * ROWS, "a warning"]
    assert re.search(r"2/30.*\r\n.*▃\r", shown.raw)  # what writes past the screen begins on a line of its own
    assert "\x1b[?25" not in shown.raw  # who is killed cannot give a hidden cursor back
    assert "reward" not in shown.log


def shown_now(there: Screen) -> list[str]:
    return [line for part in there.in_place().renderables if isinstance(part, Text) for line in part.plain.split("\n")]


def test_what_takes_long_has_a_bar_that_goes_when_it_is_done(terminal):
    with terminal() as shown:
        with busy("quickly done"):
            pass
        with busy("preflight", 19) as step:
            step()
            step()
            time.sleep(0.3)
        assert SCREENS[-1].live is None
        print("the end")
    assert shown.lines == ["the end"] and "quickly" not in shown.raw
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", shown.raw)
    assert re.search(r"preflight ━+.* 2/19 0:00", drawn)


def test_what_stands_still_is_drawn_once(terminal):
    """Redrawn, it would erase the lines of libraries in C and of other processes."""
    with terminal() as shown:
        there = SCREENS[-1]
        there.status = Text("1/30")
        for _ in range(5):
            there.tick()
        there.status = Text("2/30")
        there.tick()
    assert (shown.raw.count("1/30"), shown.raw.count("2/30")) == (1, 1)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_several_processes_on_one_terminal_have_no_bars(terminal, monkeypatch, name):
    with terminal() as shown:
        there = SCREENS[-1]
        monkeypatch.setenv(name, "2")  # by Lightning, after the screen has begun
        there.status = Text("1/30")
        there.tick()
        assert not there.bars
    assert "1/30" not in shown.raw


def test_a_bar_of_what_is_done_now_hides_that_of_the_whole_program(terminal):
    with terminal(), busy("working"):
        there = SCREENS[-1]
        time.sleep(0.1)
        assert [len(there.in_place().renderables)] == [1]
        there.doing("playing rollout 1")
        assert not there.in_place().renderables
        time.sleep(0.1)
        assert len(there.in_place().renderables) == 1


def test_a_fork_speaks_without_the_screen(terminal):
    """Its locks may be held for ever by the thread that draws."""
    with terminal() as shown:
        there, taken, free = SCREENS[-1], threading.Event(), threading.Event()

        def draw() -> None:
            with there.lock:
                taken.set()
                free.wait()

        threading.Thread(target=draw).start()
        taken.wait()
        if not (child := os.fork()):
            signal.alarm(10)
            sys.stdout.write("of the child\n")
            sys.stdout.flush()
            there.tick()
            there.stop()
            os._exit(len(SCREENS) + there.bars)
        free.set()
        assert os.waitpid(child, 0)[1] == 0
    assert shown.lines == ["of the child"]


def test_a_debugger_is_not_drawn_over(terminal, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: asked.append(SCREENS[-1].live))
    with terminal(), busy("loading the model"):
        time.sleep(0.1)
        breakpoint()
        time.sleep(0.05)
        assert asked == [None] and SCREENS[-1].live is None


def test_an_answer_is_not_drawn_over(terminal, monkeypatch):
    """As pdb.set_trace() and code.interact() ask for one; afterwards the status comes back."""

    def answer(prompt):
        SCREENS[-1].tick()
        return f"{prompt} {SCREENS[-1].live}"

    monkeypatch.setattr("builtins.input", answer)
    with terminal():
        there = SCREENS[-1]
        there.status = Text("1/30")
        there.tick()
        assert input("live:") == "live: None"
        there.tick()
        assert there.live
        with screen(bars=False):
            assert input != there.asked
        assert input == there.asked


def test_the_streams_are_given_back_though_one_is_broken(monkeypatch):
    out, err = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    asked, hook = builtins.input, sys.breakpointhook
    there = Screen().start()
    sys.stdout.write("a line without an end")
    err.write("before, ")
    sys.stderr.write("and this")
    out.close()
    there.stop()
    there.stop()  # as if a program with a screen of its own had been there first
    assert sys.stdout is out and sys.stderr is err and err.getvalue() == "before, and this"
    assert not SCREENS and builtins.input is asked and sys.breakpointhook is hook


def closed() -> StringIO:
    (stream := StringIO()).close()
    return stream


class Tee:
    """As users write one: it has no isatty. said: what it got."""

    said = ""

    def write(self, text: str) -> None:
        self.said += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stream", [None, closed(), tee := Tee()])
def test_a_stream_that_is_not_there_or_knows_little(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with screen() as there:
        there.status = Text("1/30")
        there.tick()
        print(LINE)
        print("and", end="", flush=True)
        console().print("more")
    assert sys.stdout is stream and sys.stderr is stream
    if stream is tee:
        assert tee.said == f"{LINE}\nandmore\n"


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        (
            "stopped; to resume: python train.py run='/a b/c' rollout.num_rollouts=80 seed=1",
            ["stopped; to resume:", "  python train.py run='/a b/c' \\", "    rollout.num_rollouts=80 seed=1"],
        ),
        (f"written to /{'folder/' * 8}run: metrics.csv", ["written to", f"  /{'folder/' * 8}run:", "  metrics.csv"]),
        (
            "     a remedy that is indented, and a little too long",
            ["     a remedy that is indented, and a", "       little too long"],
        ),
        ("答案" * 12 + " " + "答案" * 4, ["答案" * 12, "  " + "答案" * 4]),  # each letter has two columns
        ("x" * 40, ["x" * 40]),
        ("one\n\nthree", ["one", "", "three"]),
    ],
)  # fmt: skip
def test_a_line_is_broken_between_words(line, rows):
    assert wrapped(Text(line), COLUMNS).plain.split("\n") == rows


def test_a_program_on_a_real_terminal_has_its_width():
    """Nobody says COLUMNS: the terminal has 50."""
    real = Terminal(50)
    program = (
        "from grpo.extras.terminal.screen import screen\n"
        "import sys\n"
        f"with screen(): print({LINE!r}); print({LINE!r}, file=sys.stderr)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    ends = {"stdin": real.end, "stdout": real.end, "stderr": real.end}
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], **ends, cwd=root, env=environment, check=True, timeout=60)
    said = seen(real.close(), 50)
    assert [line for line in said if line] == 2 * [
        "memory: 0.83 GB in an update, 0.72 GB in a",
        "        rollout, of 22.01 GB on cpu: weights 5.05",
        "        MB",
    ]
