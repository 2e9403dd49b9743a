"""Writes the short text of --help: usage, the groups of conf/ with the names of their options, and the other keys' names.

`--help all` has what each option is, and every key with its value: grpo/config/help.py.
"""

import re
import textwrap
from collections.abc import Sequence

from grpo.config.composing import options
from grpo.config.help import HARD, OURS, USAGE, described, keys_and_choices, phrases_of, used

WIDTH = 80
LEFT = 20  # columns of a group's name


def help_text(config_name: str, words: Sequence[str] = ()) -> str:
    """Return the text of --help. words: overrides; `all` for every option and key; names of groups or keys, for these alone.

    Raises UserError for a name that is neither.
    """
    names = [word for word in words if re.fullmatch(r"[\w./]+", word)]
    overrides = [word for word in words if word not in names]
    if names and "all" not in names:
        return "\n\n".join(described(config_name, overrides, name) for name in names)
    return f"{USAGE}\n\n{(described if names else overview)(config_name, overrides)}"


def overview(config_name: str, overrides: Sequence[str] = ()) -> str:
    """Return the groups with their phrases and options, then the names of the keys that no group has."""
    keys, choices = keys_and_choices(config_name, overrides)
    groups, _ = phrases_of(config_name, choices)
    lines = ["The groups and their options; * is the one in use:", ""]
    for group, phrase in groups.items():
        named = [f"*{HARD}{name}" if name in used(choices.get(group)) else name for name in options(group)]
        lines += [f"{group:<{LEFT}}{phrase}", *indented(", ".join(named))]
    others = [key for key in keys if key not in OURS and key not in groups]
    lines += ["", "Other keys:", *indented(", ".join(others))]
    lines += [
        "",
        "--help GROUP: one group, as --help rollout. --help all: every option and key, with its meaning and range.",
    ]
    return "\n".join(lines).replace(HARD, " ")


def indented(text: str) -> list[str]:
    """Return a text as lines to the right of the groups' names."""
    indent = " " * LEFT
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
