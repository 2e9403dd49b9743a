"""Thoughts: the block of <think> that a policy's message begins with, and the ways in which chat templates take it.

A message keeps its thought in its text, as it was sampled. Some templates (Qwen 3.8) read it from a field of its own. Others
(Nemotron 3) need the opening tag, although it stands in their prompts. Which ways a template understands is found by trying.
"""

from functools import partial
from typing import Any, Protocol

OPENED, CLOSED = "<think>", "</think>"
BEGINNINGS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "{")  # of a message that is a call
FIELDS = ("reasoning_content", "reasoning", "thinking")

Written = dict[str, Any]  # a message in the form that chat templates take


class Manner(Protocol):
    """A way to pass a message of the policy on."""

    def __call__(self, written: Written, opening: str) -> Written:
        """Return the message for the template. opening: the beginning of a thought that stands in the prompt."""


def after_thinking(text: str) -> int:
    """Where the thinking ends that a message begins with. Its <think> may be missing: some templates end a prompt with it."""
    start, end = text.find(OPENED), text.find(CLOSED)
    if end < 0:
        return 0
    opened = start >= 0 and not text[:start].strip()
    unopened = (start < 0 or end < start) and not text.lstrip().startswith(BEGINNINGS)
    return end + len(CLOSED) if opened or unopened else 0


def parted(text: str) -> tuple[str | None, str]:
    """Return the thought that a message begins with, None without one, and the rest. No character is lost but the tags."""
    if not (end := after_thinking(text)):
        return None, text
    thought = text[: end - len(CLOSED)]
    return thought.lstrip().removeprefix(OPENED) if OPENED in thought else thought, text[end:]


def with_thought(thought: str, text: str) -> str:
    """Return a message's text with the thought that came apart from it."""
    return f"{OPENED}\n{thought.strip()}\n{CLOSED}\n\n{text}"


def as_it_is(written: Written, opening: str) -> Written:
    """The text as it was sampled."""
    return written


def opened(written: Written, opening: str) -> Written:
    """With the beginning of the thought that stood in the prompt."""
    text = written["content"]
    whole = text if text.lstrip().startswith(OPENED) else opening + text
    return written | {"content": whole} if after_thinking(whole) else written


def in_field(written: Written, opening: str, field: str, trimmed: int) -> Written:
    """The thought in a field of its own. trimmed: 2 takes the line breaks from thought and rest, 1 from the rest, 0 from none."""
    thought, rest = parted(opened(written, opening)["content"])
    if thought is None:
        return written
    return written | {
        field: thought.strip("\n") if trimmed > 1 else thought,
        "content": rest.lstrip("\n") if trimmed else rest,
    }


WAYS: tuple[Manner, ...] = (
    as_it_is,
    opened,
    *(partial(in_field, field=f, trimmed=t) for f in FIELDS for t in (2, 1, 0)),
)


def oddity(history: str, thought: str, rest: str) -> int:
    """Return how badly a template wrote a thought and what follows it: 0 if both are there, 1 if it drops the thought, 2 if a tag
    is missing, there are two blocks, the thought stands outside of its block, or the rest is lost."""
    place = history.find(thought)
    broken = not history.count(OPENED) == history.count(CLOSED) <= 1 or rest not in history
    if broken or (place >= 0 and history[:place].rfind(OPENED) <= history[:place].rfind(CLOSED)):
        return 2
    return int(place < 0)
