"""Docstrings as Markdown: lines of the form `name: text` become a list."""

import re

import griffe

ITEM = re.compile(r"^ {0,4}([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def as_markdown(text: str) -> str:
    """`name: text` lines with their indented continuations -> items of a list. Blocks after a blank line stay code."""
    lines, inside = [], False
    for line in text.splitlines():
        item = ITEM.match(line)
        if item:
            lines += [] if inside else [""]
            lines.append(f"- **{item[1]}**: {line[item.end() :]}")
        elif inside and line.strip():
            lines.append(f"    {line.strip()}" if line.startswith(" ") else line)
        else:
            lines.append(line)
        inside = bool(item) or (inside and bool(line.strip()))
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before mkdocstrings renders it."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
