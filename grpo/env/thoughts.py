"""Thoughts: the block of <think> that a policy's message begins with, and the ways in which chat templates
take it.

A message keeps its whole thought in its text. Where a prompt leaves a thought open, the message begins with
what the prompt has of it, so that whoever reads the text knows. Some templates (Qwen 3.8) read a thought from
a field of its own. Which ways a template understands is found by trying. A thought that the model marks in
another way has the usual tags in a message, and its own in a prompt.
"""

import re
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

OPENED, CLOSED = "<think>", "</think>"
FIELDS = ("reasoning_content", "reasoning", "thinking")

Written = dict[str, Any]  # a message in the form that chat templates take


class Manner(Protocol):
    """A way to pass a message of the policy on."""

    def __call__(self, written: Written, opening: str) -> Written:
        """Return the message for the template. opening: the beginning of a thought that stands in the
        prompt."""


def after_thoughts(text: str) -> str:
    """Return what a message says after its thoughts, where alone answers are looked for: nothing if the last
    one never ends."""
    rest = text.rpartition(CLOSED)[2]
    return "" if OPENED in rest else rest


def left_open(text: str) -> str:
    """Return the thought that is open at the end of a text, with its tag; nothing if none is."""
    start = text.rfind(OPENED)
    return text[start:] if start > text.rfind(CLOSED) else ""


def after_thinking(text: str) -> int:
    """Return the place after the thought with which a message begins; 0 if it begins with none."""
    end = text.find(CLOSED)
    return end + len(CLOSED) if end >= 0 and text.lstrip().startswith(OPENED) else 0


def unopened(text: str) -> int:
    """Return the place after a </think> that nothing opens, as in texts that others have read or written; 0
    if there is none."""
    before, closed, _ = text.partition(CLOSED)
    return len(before + closed) if closed and OPENED not in before else 0


def parted(text: str) -> tuple[str | None, str]:
    """Return the thought that a message begins with, None without one, and the rest. No character is lost but
    the tags."""
    if not (end := after_thinking(text) or unopened(text)):
        return None, text
    thought = text[: end - len(CLOSED)]
    return thought.lstrip().removeprefix(OPENED) if OPENED in thought else thought, text[end:]


def with_thought(thought: str, text: str) -> str:
    """Return a message's text with the thought that came apart from it."""
    return f"{OPENED}\n{thought.strip()}\n{CLOSED}\n\n{text}"


class Tags(NamedTuple):
    """How a model itself marks a thought. token: the first token. name: what stands after it. end: the last
    token. known: what shows that a template means them, if it does not write their end. around: what the model writes
    before and after its answer, which is no part of a message."""

    token: str = OPENED
    name: str = ""
    end: str = CLOSED
    known: str = ""
    around: tuple[str, ...] = ()

    def read(self, text: str) -> str:
        """Return what the model wrote, with the tags of this module."""
        return text.replace(self.token + self.name, OPENED).replace(self.end, CLOSED)

    def said(self, text: str) -> str:
        """Return a message that the model wrote, with the tags of this module."""
        return self.read(reduce(lambda rest, mark: rest.replace(mark, ""), self.around, text))

    def written(self, text: str) -> str:
        """Return a message's text as the model writes it."""
        return text.replace(OPENED, self.token + self.name).replace(CLOSED, self.end)


TAGS = [Tags(**own) for own in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))]


def tags_of(template: str) -> Tags:
    """Return the tags that a chat template knows: the first of thoughts.yaml that it has, or else the usual
    ones."""
    return next((tags for tags in TAGS if (tags.known or tags.end) in template), Tags())


def opened(written: Written, opening: str) -> Written:
    """With the beginning of the thought that stood in the prompt."""
    text = written["content"]
    whole = text if text.lstrip().startswith(OPENED) else opening + text
    return written | {"content": whole} if after_thinking(whole) else written


def in_field(written: Written, opening: str, field: str, trimmed: int) -> Written:
    """The thought in a field of its own. trimmed: 2 takes the line breaks from thought and rest, 1 from the
    rest, 0 from none."""
    thought, rest = parted(opened(written, opening)["content"])
    if thought is None:
        return written
    return written | {
        field: thought.strip("\n") if trimmed > 1 else thought,
        "content": rest.lstrip("\n") if trimmed else rest,
    }


def in_channels(written: Written, opening: str) -> Written:
    """As the template of gpt-oss takes it, which allows no text between a thought and a call, and writes the
    channels itself."""
    text = re.sub(r"<\|[a-z]+\|>", " ", written["content"])  # of a message that could not be read
    written, (thought, rest) = written | {"content": text}, parted(text)
    if thought is None:
        return written
    if "tool_calls" in written:
        return written | {"thinking": "\n".join(part for part in (thought, rest) if part), "content": ""}
    return written | {"thinking": thought, "content": rest}


WAYS: tuple[Manner, ...] = (
    lambda written, opening: written,  # the text as it was sampled
    opened,
    *(partial(in_field, field=f, trimmed=t) for f in FIELDS for t in (2, 1, 0)),
)


def oddity(history: str, thought: str, rest: str, around: Sequence[str] = ()) -> int:
    """Return how badly a template wrote a thought and what follows it: 0 if both are there, 1 if it drops the
    thought, 2 if a tag is missing, there are two blocks, the thought stands outside of its block or inside of
    the answer, or the rest is lost. around: the marks of an answer."""
    place = history.find(thought)
    broken = not history.count(OPENED) == history.count(CLOSED) <= 1 or rest not in history
    inside = any(0 <= history.find(mark) < history.find(OPENED) for mark in around)
    outside = place >= 0 and history[:place].rfind(OPENED) <= history[:place].rfind(CLOSED)
    return 2 if broken or inside or outside else int(place < 0)
