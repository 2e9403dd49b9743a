"""Writes the text of --help all: usage, the groups of conf/ with their options, and every key with its value.

Each phrase of the text is a comment in conf/: for a group, beside its line in the defaults list of train.yaml (or of
algo/grpo.yaml, for an axis of an algorithm); for an option, at the top of its file; for a key, beside the key.
"""

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf

from grpo.config.composing import CONF, composed, options
from grpo.config.explain import known_keys, no_key
from grpo.config.validation import kinds
from grpo.system.errors import UserError
from grpo.system.ranges import Range, spelled

WIDTH = 100
HARD = "\xa0"  # a space at which no line ends
OURS = ("_target_", "_partial_", "_convert_", "hydra")  # keys that --cfg shows and --help leaves out

USAGE = Path(__file__).with_name("usage.txt").read_text(encoding="utf-8").rstrip()


def described(config_name: str, overrides: Sequence[str] = (), only: str = "") -> str:
    """Return the second part of --help: the groups with their options, and all keys with their values.

    only: a group or a key to show alone. Raises UserError if it is neither.
    """
    keys, choices = keys_and_choices(config_name, overrides)
    groups, phrases = phrases_of(config_name, choices)
    phrases |= {g.replace("/", "."): phrase for g, phrase in groups.items()}
    texts = ((key, compact(kind).replace(" ", HARD)) for key, _, kind in kinds(keys))
    ranges = {key: f" ({text})" for key, text in texts if text}
    phrases = {key: (phrase + ranges.get(key, "")).lstrip() for key, phrase in phrases.items()}
    if only:
        path = only.replace("/", ".")
        groups = {group: phrase for group, phrase in groups.items() if group.replace("/", ".") == path}
        keys = alone(keys, path.split("."))
        if not groups and not keys:
            raise UserError(no_key(path, known_keys(config_name, overrides)))
    lines = [*option_lines(groups, choices), ""] if groups else []
    lines += ["The keys of this command line:", "", *tree(keys, phrases)] if keys else []
    return "\n".join(lines).replace(HARD, " ")


def keys_and_choices(config_name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every key with its value, and the options in use of each group."""
    config = composed(config_name, overrides, return_hydra_config=True)
    keys = OmegaConf.to_container(config)
    several = {group: list(node) for group, node in keys.items() if isinstance(node, Mapping)}  # callbacks=[A,B]
    return keys, several | dict(config.hydra.runtime.choices)


def option_lines(groups: Mapping[str, str], choices: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of groups with their options. groups: the phrase of each. choices: the options in use."""
    yield "The groups and their options; * is the one in use:"
    for group, phrase in groups.items():
        yield from ["", *row(group, phrase, 20)]
        for option in options(group):
            mark = "*" if option in used(choices.get(group)) else " "
            yield from row(f"  {mark} {option}", first_line(CONF / group / f"{option}.yaml"), 28)


def alone(node: Any, path: Sequence[str]) -> dict[str, Any]:
    """Return the one key at a path below a node, within the nodes above it; {} if it does not exist."""
    name, *rest = path
    if not isinstance(node, Mapping) or name not in node:
        return {}
    inner = alone(node[name], rest) if rest else node[name]
    return {name: inner} if inner or not rest else {}


def phrases_of(config_name: str, choices: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the phrase of each group, in the order of the defaults list, and of each dotted key; "" for no phrase."""
    train, root = (comments_of(CONF / f"{name}.yaml") for name in ("train", config_name))
    groups: dict[str, str] = {}
    keys = {key: phrase for comments in (train, root) for key, phrase in comments.items() if phrase}
    listed = [key.removeprefix("defaults.").removeprefix("optional ") for key in root if key.startswith("defaults.")]
    for name in (name for name in listed if (CONF / name).is_dir() and name != "hydra"):
        groups[name] = keys.get(f"defaults.{name}") or keys.get(f"defaults.optional {name}", "")
        for file in files_of(name, choices.get(name)):
            axes = {f"{name}/{key.removeprefix('defaults.')}": phrase for key, phrase in comments_of(file).items()}
            groups |= {axis: phrase for axis, phrase in axes.items() if (CONF / axis).is_dir()}
    for choice in sorted(choices, key=lambda choice: "@" not in choice):  # a file that mounts others wins
        group, _, package = choice.partition("@")
        for file in files_of(group, choices[choice]):
            place = package or group.replace("/", ".")
            if package:
                keys[package] = first_line(file)
            header = file.read_text(encoding="utf-8").partition("\n")[0]
            if header.startswith("# @package"):
                place = header.split()[-1].replace("_global_", "")
            keys |= {f"{place}.{key}".lstrip("."): phrase for key, phrase in comments_of(file).items() if phrase}
    return groups, keys


def files_of(group: str, choice: Any) -> list[Path]:
    """Return the files of the chosen options of a group, each after the files that it inherits from."""
    return [file for option in used(choice) for file in lineage(CONF / group / f"{option}.yaml")]


def used(option: Any) -> list[str]:
    """Return the options of a choice as a list: none, one or several."""
    return [] if option is None else [option] if isinstance(option, str) else list(option)


def lineage(file: Path) -> list[Path]:
    """Return a file after the files of its group that it inherits from; empty if it does not exist."""
    if not file.is_file():
        return []
    defaults = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults", [])
    bases = [name for name in defaults if isinstance(name, str)]
    return [*(base for name in bases for base in lineage(file.with_name(f"{name}.yaml"))), file]


def first_line(file: Path) -> str:
    """Return the first comment of a file, except a `# @package` line, to the end of its sentence; "" for no comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    begun = dropwhile(lambda line: not line.startswith("#") or line.startswith("# @package"), lines)
    comment = [line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), begun)]
    if not comment or comment[0].endswith("."):
        return comment[0] if comment else ""
    end = re.compile(r"\.(?= |$)").search(text := " ".join(comment), len(comment[0]))
    return text[: end.end()] if end else text


def comments_of(file: Path) -> dict[str, str]:
    """Return the comment beside each dotted key of a YAML file; "" for no comment."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                yield from walk(item, prefix)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                one_line = value.end_mark.line == key.start_mark.line
                end = value.end_mark if one_line else key.end_mark
                rest = lines[end.line][end.column :].lstrip(": ")
                yield f"{prefix}{key.value}", rest[1:].strip() if rest.startswith("#") else ""
                yield from walk(value, f"{prefix}{key.value}.")

    return dict(walk(yaml.compose(text), ""))


def tree(node: Mapping[str, Any], phrases: Mapping[str, str], path: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the lines of the keys under a node: key, value and phrase, indented by depth. path: the dotted prefix of the node."""
    for key, value in node.items():
        if key in OURS:
            continue
        inner = isinstance(value, Mapping) and value
        left = f"{'  ' * depth}{key}:"
        if not inner:
            left += " " + yaml.safe_dump(value, default_flow_style=True, width=1000).partition("\n")[0]
        phrase = phrases.get(f"{path}{key}", "")
        yield from row(left, f"# {phrase}" if phrase else "", 40)
        if inner:
            yield from tree(value, phrases, f"{path}{key}.", depth + 1)


def row(left: str, phrase: str, column: int) -> Iterator[str]:
    """Yield the lines of a table row: the phrase wrapped to the right of `left`, or below it if `left` is too long."""
    words = textwrap.wrap(phrase, WIDTH - column)
    if len(left) >= column:
        yield left
        left = ""
    for i, line in enumerate(words or [""]):
        yield f"{'' if i else left:<{column}}{line}".rstrip()


def compact(kind: Any) -> str:
    """Return the range of an annotation compactly, as `integer >= 1`; "" if it has none."""
    for member in (kind, *get_args(kind)):
        bounds = next((part for part in get_args(member) if isinstance(part, Range)), None)
        if bounds is not None:
            if bounds.high >= 10**9:  # only what a float, a seed or a thread can hold
                bounds = replace(bounds, high=math.inf)
            noun = spelled(get_args(member)[0]).partition(" ")[2]
            return f"{noun} {bounds.words('>=', '>', '<=', '<')}"
    return ""
