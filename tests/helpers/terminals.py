"""A terminal for tests: a real one for the program (a pty), and what a person sees on it."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from contextlib import suppress

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Terminal:
    """A terminal of so many columns. end: the program's side of it, a file descriptor. Mutable: said, all that it has got."""

    def __init__(self, columns: int) -> None:
        self.columns, self.said = columns, b""
        self.ours, self.end = pty.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other side has gone
            while piece := os.read(self.ours, 65536):
                self.said += piece

    def close(self) -> str:
        """Return all that it has got, once the program's side is closed."""
        os.close(self.end)
        self.reader.join(10)
        os.close(self.ours)
        return self.said.decode()


def seen(said: str, columns: int) -> list[str]:
    """Return the lines that a person sees: text goes where the cursor is, and a line that is full goes on in the next one."""
    lines, row, column = [""], 0, 0
    for found in CONTROL.finditer(said):
        match found[0], found[2]:
            case "\n", _:
                row += 1
            case "\r", _:
                column = 0
            case _, "A":
                row = max(0, row - int(found[1] or 1))
            case _, "K":
                lines[row] = "" if found[1] == "2" else lines[row][:column]
            case text, None:
                for letter in text:
                    if column == columns:
                        row, column = row + 1, 0
                        lines += [""] * (row + 1 - len(lines))
                    lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
                    column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
