"""Standard output and standard error beside a screen: what is written there, line by line, and in the log file."""

import io
import logging
from typing import Any, TextIO

from rich.text import Text

from grpo.system.output.console import log_files, to_logs


class Nowhere(io.TextIOBase):
    """In place of a standard stream that is closed, or None, as in a program without a console."""

    def write(self, text: str) -> int:
        return len(text)


class Stream:
    """Standard output or standard error beside a screen. given: the stream itself; real: where it writes. Mutable: rest, the
    begin of a line that is not written yet; open, what of a line without an end is written; screen, the Screen, None once it is
    off."""

    def __init__(self, given: TextIO | None, screen: Any) -> None:
        self.given, self.rest, self.open = given, "", ""
        self.real: Any = Nowhere() if given is None or getattr(given, "closed", False) else given
        self.screen = screen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def isatty(self) -> bool:
        """Return whether it is a terminal: not if it does not know, as one of a user that writes into two files."""
        return getattr(self.real, "isatty", bool)()

    def write(self, text: str) -> int:
        """Say the lines that end in this text."""
        if (screen := self.screen) is None:
            return self.real.write(text)
        with screen.lock:
            logger = spoken_by_logging(self)
            if logger and (self.rest or self.open):
                self.flush()
                screen.end_line()
            *lines, self.rest = (self.rest + text).split("\n")
            for line in lines:
                screen.say(line, self, logged=not logger)
            if "\r" in self.rest:  # as a program counts in place
                screen.begin_line(self)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Say these lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the begin of a line, too, as a program that shows dots expects it."""
        if self.rest and (screen := self.screen):
            with screen.lock:
                screen.begin_line(self)
        self.real.flush()


def spoken_by_logging(stream: Stream) -> bool:
    """Return whether it is a handler of the root logger that writes to a stream at this moment: the log file has its records."""
    handlers = [handler for handler in logging.getLogger().handlers if getattr(handler, "stream", None) is stream]
    return any(handler.lock._is_owned() for handler in handlers if handler.lock)


def last(line: str) -> str:
    """Return what is seen of a line that carriage returns begin anew: the last part that is not empty."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def log_line(line: str) -> None:
    """Write a line to the log files, as it was last, without colors."""
    if line.strip() and log_files():
        to_logs(Text.from_ansi(last(line)).plain)
