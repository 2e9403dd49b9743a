"""The screen: what a program says, line by line, and below it on a terminal what changes in place.

A program speaks through print, logging and rich, on standard output and standard error. While a `Screen` is there, each message
begins on a line of its own, is broken between words where it is longer than the terminal is wide, and is in the log file. Output
that is no terminal stays as it was said.
"""

import builtins
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, NewLine, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo.extras.terminal.streams import Stream, last, log_line
from grpo.extras.terminal.wrapping import wrapped
from grpo.system.output import console as output
from grpo.system.output.console import Logged

PATIENCE = 2.0  # seconds after which work has a bar
TICK = 0.2  # seconds between two looks at what changes in place
MOVES = re.compile(r"\x1b(?!\[[0-9;]*m)")  # a control sequence that does more than color
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(eq=False)
class Work:
    """A thing that the program does. total: its steps; None if nobody knows. Mutable: done, those that are over."""

    words: str
    total: int | None = None
    done: int = 0
    begun: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begun

    def bar(self) -> Table:
        """Return a line with a bar, which only moves if nobody knows how many steps there are."""
        shown = Table.grid(padding=(0, 1))
        count = () if self.total is None else (f"{self.done}/{self.total}",)
        minutes, seconds = divmod(int(self.seconds), 60)
        bar = ProgressBar(self.total, self.done, width=20, pulse=self.total is None)
        shown.add_row(Text(self.words, no_wrap=True, overflow="ellipsis"), bar, *count, f"{minutes}:{seconds:02}")
        return shown


class Wrapping(Logged):
    """The console of a screen: its single lines are broken between words, and whole in the log. Mutable: screen."""

    screen: "Screen | None" = None

    def print(self, *objects: Any, **options: Any) -> None:
        # another thread of rich holds a lock while it moves the cursor
        if self.screen is None or (objects and isinstance(objects[0], Control | NewLine)):
            return super().print(*objects, **options)
        with self.screen.lock:
            self.screen.end_line()
            shown = objects
            if options.get("soft_wrap"):
                styles = {name: options.get(name) for name in ("markup", "highlight")}
                texts = [each if isinstance(each, Text) else self.render_str(str(each), **styles) for each in objects]
                shown = [wrapped(text, self.width) for text in texts]
            Console.print(self, *shown, **options)
            self.keep(*objects, **options)

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is: a program that is killed could not give it back."""
        return False


class Screen:
    """Takes standard output and standard error from `start` until `stop`, and shows what takes long.

    bars: whether anything may change in place; else there are lines alone. Mutable: status, which stays below the lines; works,
    what the program is doing, the innermost last; now, the one of them that `doing` has named; drawn, what is in place;
    typed, the questions that wait for a person.
    """

    def __init__(self, bars: bool = True) -> None:
        self.lock = threading.RLock()
        self.out, self.err = Stream(sys.stdout, self), Stream(sys.stderr, self)
        self.folds = self.out.isatty()
        self.console: Console = Wrapping(file=self.out.real) if self.folds else output.console(file=self.out.real)
        self.sized = Console(file=(self.out if self.folds else self.err).real)
        self.allowed = bars and self.folds and not self.console.is_dumb_terminal
        self.status: RenderableType | None = None
        self.works: list[Work] = []
        self.now: Work | None = None
        self.live: Live | None = None
        self.drawn, self.typed = "", 0
        self.open: Stream | None = None  # whose line has no end yet
        self.over = threading.Event()

    def start(self) -> "Screen":
        """Begin."""
        if self.folds:
            self.console.screen = self
        sys.stdout, sys.stderr = self.out, self.err
        output.SCREENS.append(self)
        self.hook, sys.breakpointhook = sys.breakpointhook, self.debugged
        self.ask, builtins.input = builtins.input, self.asked
        if self.allowed:
            threading.Thread(target=self._tick, name="screen", daemon=True).start()
        return self

    def stop(self) -> None:
        """End, and leave nothing that changes in place. The streams are given back even if one of them is broken."""
        self.over.set()
        with self.lock:
            output.SCREENS[:] = [other for other in output.SCREENS if other is not self]
            sys.breakpointhook = self.hook
            builtins.input = self.ask if builtins.input == self.asked else builtins.input
            sys.stdout = self.out.given if sys.stdout is self.out else sys.stdout
            sys.stderr = self.err.given if sys.stderr is self.err else sys.stderr
            self.status, self.works = None, []
            for stream in (self.out, self.err):
                with suppress(OSError, ValueError):  # it has been closed, or nobody reads it any more
                    stream.flush()
                    self.clear()
                log_line(stream.open)
                stream.screen = None
            if self.folds:
                self.console.screen = None

    def debugged(self, *given: Any, **named: Any) -> Any:
        """In place of sys.breakpointhook: from now on nothing changes in place below what a person types."""
        with self.lock:
            self.allowed = False
            self.clear()
        return self.hook(*given, **named)

    def asked(self, *prompt: Any) -> str:
        """In place of input, which pdb and code.interact use, too: nothing changes in place while a person types."""
        with self.lock:
            self.typed += 1
            self.clear()
        try:
            return self.ask(*prompt)
        finally:
            self.typed -= 1

    # -- lines

    def say(self, line: str, stream: Stream, logged: bool) -> None:
        """Write a line of a stream. logged: whether the log file gets it too."""
        whole, stream.open = stream.open + line, ""
        if self.open is stream:
            stream.real.write(f"{line}\n")
            self.open = None
        else:
            self.end_line()
            self.put(line, stream)
        if logged:
            log_line(whole)

    def put(self, line: str, stream: Stream) -> None:
        """Write a whole line, above what changes in place."""
        if not stream.isatty():
            stream.real.write(f"{line}\n")
        elif self.folds and not MOVES.search(line) and (self.live or self.others or "\x1b" in line):
            Console.print(self.console, wrapped(Text.from_ansi(line), self.sized.width), soft_wrap=True)
        else:
            self.clear()
            shown = line if "\x1b" in line else wrapped(Text(line), self.sized.width).plain
            stream.real.write(f"{shown}\n")

    def begin_line(self, stream: Stream) -> None:
        """Write what a stream has of a line, which has no end yet."""
        if self.others:
            return
        self.clear()
        if self.open is not stream:
            self.end_line()
        stream.real.write(stream.rest)
        line, stream.rest = stream.open + stream.rest, ""
        stream.open = last(line) + "\r" * line.endswith("\r")
        # a library has removed its bar if the line is blank
        self.open = stream if CONTROLS.sub("", stream.open).strip() else None

    def end_line(self) -> None:
        """End the line that waits for its end, before another one begins. A file has it as it was said."""
        if self.open:
            self.open.real.write("\n" * self.open.isatty())
            log_line(self.open.open)
            self.open.open, self.open = "", None

    # -- what changes in place

    @property
    def bars(self) -> bool:
        """Whether anything may change in place now: not while a person types, and not where other processes of the run, of which
        torchrun and Lightning tell in the environment, write to the terminal, too."""
        processes = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
        return self.allowed and not self.typed and processes == "1"

    @property
    def others(self) -> bool:
        """Whether something else of rich changes in place, as the bar of an evaluation."""
        return bool([live for live in getattr(self.console, "_live_stack", []) if live is not self.live])

    @contextmanager
    def busy(self, words: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a bar while the `with` block runs, if that takes long. Yields what counts a step of `total`."""
        work = Work(words, total)
        with self.lock:
            self.works.append(work)

        def step() -> None:
            work.done += 1

        try:
            yield step
        finally:
            with self.lock:
                self.works = [other for other in self.works if other is not work]
                self.tick()

    def doing(self, words: str) -> None:
        """Name what the program is doing from now on, until it is named anew."""
        with self.lock:
            before, self.now = self.now, Work(words)
            self.works = [work for work in self.works if work is not before] + [self.now]

    def in_place(self) -> Group:
        """Return what is shown below the lines: the status, and the bar of the innermost work that takes long."""
        works = self.works  # what has begun before `now` lasts as long as the program
        works = works[works.index(self.now) :] if self.now in works else works
        long = [work.bar() for work in works if work.seconds >= PATIENCE]
        return Group(*([] if self.status is None else [self.status]), *long[-1:])

    def tick(self) -> None:
        """Show what has changed in place. If nothing has, lines of libraries in C and of other processes stay where they are."""
        with self.lock:
            if not self.bars or self.open or self.others or not (shown := self.in_place()).renderables:
                return self.clear()
            drawn, self.drawn = self.drawn, "".join(part.text for part in self.console.render(shown))
            if self.live and drawn == self.drawn:
                return
            if self.live is None:  # a new one: rich would erase the lines where the last one was
                options = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
                self.live = Live(get_renderable=self.in_place, console=self.console, **options)
                self.live.start()
            self.live.refresh()
            self.out.real.write("\r")  # libraries in C write past the screen: not behind the bar
            self.out.real.flush()

    def clear(self) -> None:
        """Remove what changes in place. It comes back with the next tick."""
        if self.live:
            live, self.live = self.live, None
            live.stop()

    def _tick(self) -> None:
        while not self.over.wait(TICK):
            self.tick()


@contextmanager
def screen(bars: bool = True) -> Iterator[Screen]:
    """Give a program a screen."""
    shown = Screen(bars).start()
    try:
        yield shown
    finally:
        shown.stop()


def forget() -> None:
    """Leave a fork of the process without a screen: it has no thread that draws, and locks of the parent may be held for ever."""
    for shown in output.SCREENS:
        shown.lock, shown.allowed, shown.live = threading.RLock(), False, None
        shown.out.screen = shown.err.screen = None
        if isinstance(shown.console, Wrapping):
            shown.console.screen = None
    output.SCREENS.clear()


os.register_at_fork(after_in_child=forget)
