"""Lines as a terminal shows them: broken between words at its width, with the later rows indented."""

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

DEEPEST = 12  # columns; a longer prefix does not indent the later rows
PREFIX = re.compile(r"[\w ./]+: +")  # as "memory: "
COMMAND = re.compile(r"(?:^|(?<=: ))python (?=\S)")  # from which the rest of a line is a command to copy
WORD = re.compile(r"\S+")
ARGUMENT = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
Row = tuple[str, int, int, str]  # what comes before a part of the line, its ends, and what comes after it


def wrapped(text: Text, width: int) -> Text:
    """Return a text in rows of at most so many columns. Each of its own lines is broken alone."""
    lines = text.split("\n", allow_blank=True) if text.plain else [text]
    return Text("\n").join(
        Text.assemble(before, line[start:end], after)
        for line in lines
        for before, start, end, after in broken(line.plain, width)
    )


def broken(line: str, width: int) -> Iterator[Row]:
    """Yield the rows of a line. A word that is too long, as a path, stays whole. A command at the end of the line gets rows of
    its own, which are continued as a shell reads them, so that it can be copied."""
    lead = len(line) - len(line.lstrip())
    if cell_len(line) <= width or lead == len(line):
        yield "", 0, len(line), ""
        return
    prefix = PREFIX.match(line, lead)
    deep = len(prefix[0]) if prefix and len(prefix[0]) <= DEEPEST else 2
    hang = " " * min(lead + deep, width // 2)
    command = COMMAND.search(line)
    begin = command.start() if command else len(line)
    if words := [match.span() for match in WORD.finditer(line, lead, begin)]:
        yield from with_words(line, words, width, line[:lead], hang, "")
    if command:
        words = [match.span() for match in ARGUMENT.finditer(line, begin)]
        yield from with_words(line, words, width, hang if begin > lead else line[:lead], f"{hang}  ", " \\")


def with_words(
    line: str, words: Sequence[tuple[int, int]], width: int, first: str, later: str, after: str
) -> Iterator[Row]:
    """Yield rows with as many words each as they have room for. words: their ends in the line. first, later: what the rows begin
    with. after: what all rows but the last end with."""
    before, (start, end) = first, words[0]
    for low, high in words[1:]:
        if cell_len(before + line[start:high] + after) > width:
            yield before, start, end, after
            before, start = later, low
        end = high
    yield before, start, end, ""
