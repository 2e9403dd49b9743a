"""Which tokens between the policy's turns are words of the environment (ECHO, arXiv 2605.24517), and not the template's own:
marks of roles, ends of turns, the prompt of the next turn.

The template itself says where they are: it writes the conversation again, with a mark in place of each message's text.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from grpo.env.chat_template import TemplateRenderer
from grpo.env.types import State, Step
from grpo.objectives.batch import TokenBatch
from grpo.rollout.types import Group
from grpo.system.errors import UserError

ROLES = ("tool", "user")  # a message that the environment writes in the policy's name is no observation
MARK, MARKS = "[=[{}]=]", r"\[=\[(\d+)\]=\]"  # a text that no template changes


def observed(
    tokens: TokenBatch, groups: Sequence[Group], size: int, renderer: TemplateRenderer
) -> tuple[Tensor, int, int]:
    """Return which tokens are words of a message after the policy's first one, [B, C] bool; how many messages were found; and how
    many there were. groups: of the whole rollout; size: G, the samples of its largest group.

    A message is found if its text is in the tokens as it is, without the spaces at its ends, or as JSON, and if they go on from
    the policy's turn before it. A token that is partly the template's is left out.
    """
    if not hasattr(renderer, "texts"):
        line = f"algo.imitation.observed needs a renderer with `texts` and `tokenizer`, which {type(renderer).__name__} lacks"
        raise UserError(f"{line}: take renderer=default, or set it to 0")
    mask, found, every = torch.zeros(tokens.mask.shape, dtype=torch.bool), 0, 0
    for row, (place, turns) in enumerate(zip(tokens.sample.tolist(), tokens.turn.tolist(), strict=True)):
        for after in sorted({*turns} - {-1, 0}):
            sample, end = groups[place // size][place % size], turns.index(after)
            start = end - len([*takewhile(lambda turn: turn < 0, reversed(turns[:end]))])
            steps, ids = sample.trajectory.steps, sample.turns[after].prompt_ids
            places = said(steps[turns[start - 1] if start else after - 1], steps[after])
            every += max(1, len(places))
            for body in bodies(ids[len(ids) - end + start :], steps[after].state, places, renderer):
                mask[row, start + body.start : start + body.stop] = True
                found += 1
    return mask.to(tokens.mask.device), found, every


def said(before: Step, after: Step) -> list[int]:
    """Return the places of the environment's messages between two steps, in the conversation of the second."""
    messages, first = after.state.messages, len(before.state.messages) + 1
    return [i for i in range(first, len(messages)) if messages[i].role in ROLES]


def bodies(ids: Sequence[int], state: State, places: Sequence[int], renderer: TemplateRenderer) -> Iterator[range]:
    """Yield the places of each message's tokens in `ids`, the end of a state's prompt, the last message first; those before one
    that is not found are not found either. places: of the messages in the state."""
    if not (ids and places):
        return
    marked = [replace(m, content=MARK.format(i)) if i in places else m for i, m in enumerate(state.messages)]
    written, _ = next(iter(renderer.texts(marked, state.tools)))
    *pieces, last = re.split(MARKS, written)  # what the template writes, a place, what it writes, ...
    decode = partial(renderer.tokenizer.decode, clean_up_tokenization_spaces=False, spaces_between_special_tokens=False)
    text = decode(ids)
    end = len(text) - len(last) if text.endswith(last) else 0
    for before, place in reversed([*zip(pieces[::2], map(int, pieces[1::2]), strict=True)]):
        if (start := begin(text[:end], before, state.messages[place].content)) is None:
            return
        yield within(ids, text, start, end, decode)
        end = start - len(before)


def begin(text: str, before: str, content: str) -> int | None:
    """Return where a message begins that ends a text; None if it is not there. before: what the template writes before it."""
    for body in (content, content.strip(), content.rstrip(), content.lstrip()):
        for form in (body, json.dumps(body, ensure_ascii=False)[1:-1]):
            start = len(text) - len(form)
            if text.endswith(form) and (text.endswith(before, 0, start) or before.endswith(text[:start])):
                return start
    return None


def within(ids: Sequence[int], text: str, start: int, end: int, decode: Callable[[Sequence[int]], str]) -> range:
    """Return the places of the tokens that have nothing outside of text[start:end]. text: of all ids."""

    def whole(count: int) -> tuple[int, bool]:  # characters that the first tokens complete; whether they begin one more
        some = decode(ids[:count])
        complete = some if text.startswith(some) else some.rstrip("\ufffd")
        return len(complete), some != complete

    first = bisect_left(range(len(ids)), start, key=lambda i: whole(i)[0])
    return range(first, max(first, bisect_right(range(len(ids)), end, key=lambda i: sum(whole(i + 1)))))
