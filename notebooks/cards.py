"""HTML views of samples: cards to read, marked differences, and tokens by probability. All text is escaped."""

import math
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from html import escape

import pandas as pd

TEXT_STYLE = "white-space: pre-wrap; font-family: monospace; text-align: left"
CARD_STYLE = "border-left: 3px solid #999; padding: 2px 10px; margin: 10px 0; text-align: left"
REMOVED, ADDED = "rgba(213, 94, 0, 0.35)", "rgba(0, 158, 115, 0.35)"


def card(title: str, *bodies: str) -> str:
    """Return a card as HTML. title: plain text, escaped here. bodies: HTML."""
    parts = "".join(f'<div style="{TEXT_STYLE}; margin-top: 4px">{body}</div>' for body in bodies)
    return f'<div style="{CARD_STYLE}"><b>{escape(title)}</b>{parts}</div>'


def grey(text: str) -> str:
    """Return the text, escaped, in grey."""
    return f'<span style="opacity: 0.6">{escape(text)}</span>'


def samples(table: pd.DataFrame) -> str:
    """Return a card for each row of the table: reward and other facts, the prompt, the completion."""

    def title(row: dict) -> str:
        facts = [f"prompt {row['prompt_index']}, sample {row['sample']}", f"reward {row['reward']:.3g}"]
        facts += [f"advantage {row['advantage']:+.2f}"] if "advantage" in row else []
        facts += [f"{row['tokens']} tokens", row["end"] if pd.isna(row["outcome"]) else row["outcome"]]
        return " \N{MIDDLE DOT} ".join(facts)

    return "".join(card(title(row), grey(row["prompt"]), escape(row["completion"])) for row in table.to_dict("records"))


def difference(before: str, after: str) -> str:
    """Return the second text as HTML, with the words that it adds to the first and the words that it removes marked."""
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (before, after))
    marked = []
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        old, new = escape("".join(a[a_start:a_end])), escape("".join(b[b_start:b_end]))
        if kind == "equal":
            marked.append(new)
            continue
        marked += [f'<del style="background: {REMOVED}">{old}</del>'] if old else []
        marked += [f'<ins style="background: {ADDED}; text-decoration: none">{new}</ins>'] if new else []
    return "".join(marked)


def tokens(texts: Sequence[str], logprobs: Sequence[float]) -> str:
    """Return the tokens as HTML: the less probable, the redder. Hovering over a token shows its probability."""
    spans = []
    for text, logprob in zip(texts, logprobs, strict=True):
        probability = math.exp(logprob)
        shade = f"rgba(213, 94, 0, {1 - probability:.2f})"
        spans.append(f'<span title="{probability:.3f}" style="background: {shade}">{escape(text)}</span>')
    return "".join(spans)
