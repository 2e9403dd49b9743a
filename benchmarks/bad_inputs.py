"""Give every leaf of every option of conf/ values of a wrong type or range, and print what happens to each.

    python benchmarks/bad_inputs.py            counts by kind of value
    python benchmarks/bad_inputs.py --all      every input with its line

An input is refused with one line, or its type and range allow it. Nothing is built: this is the check before anything loads.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.composing import composed, options
from grpo.config.validation import check_values, kinds
from grpo.system.errors import UserError

WRONG = {
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1, "0": 0, "2.5": 2.5, "10^12": 10**12, "true": True,
    "a word": "abc", "null": None, "a list": [-1], "a mapping": {"abc": -1},
}  # fmt: skip
GROUPS = [
    "task",
    "model",
    "adapter",
    "problem",
    "judge",
    "algo",
    "algo/advantage",
    "algo/surrogate",
    "algo/kl",
    "algo/choice",
    "algo/correction",
    "critic",
    "teacher",
    "sampler",
    "selection",
    "rollout",
    "eval",
    "renderer",
    "engine",
    "optim",
    "trainer",
    "strategy",
    "resume",
    "deployment",
    "callbacks",
    "logger",
    "debug",
]
Leaf = tuple[tuple[str, ...], tuple[str | None, ...]]  # its path, and the targets of the nodes above it


def side_by_side(groups: Iterable[str]) -> list[list[str]]:
    """Return the options of several groups in as few command lines as the largest group has options."""
    lists = [[f"{group}={option}" for option in options(group)] for group in groups]
    return [[choices[i % len(choices)] for choices in lists] for i in range(max(map(len, lists)))]


def leaves(node: Mapping[str, Any], above: Leaf = ((), ())) -> Iterator[Leaf]:
    """Yield each leaf below a node. Lists and empty mappings are leaves."""
    for name, value in node.items():
        place = ((*above[0], name), above[1])
        if isinstance(value, dict) and value:
            yield from leaves(value, (place[0], (*above[1], value.get("_target_"))))
        elif name not in ("_target_", "_partial_", "_convert_"):
            yield place


def around(leaf: Leaf, value: Any) -> dict[str, Any]:
    """Return a configuration of one leaf, with the targets of the nodes above it."""
    (*above, last), targets = leaf
    node = {last: value}
    for name, target in zip(reversed(above), reversed(targets), strict=True):
        node = {name: {"_target_": target, **node} if target else node}
    return node


def found() -> dict[Leaf, Any]:
    """Return the type of each leaf of all options, of train.py, eval.py and the server."""
    every: dict[Leaf, Any] = {}
    for name, chosen in [*(("train", one) for one in side_by_side(GROUPS)), ("eval", []), ("serve", [])]:
        more = [] if name == "serve" else ["output_dir=."]
        config: DictConfig = composed(name, [*chosen, *more, *(["model.path=x"] if "model=path" in chosen else [])])
        for leaf in leaves(OmegaConf.to_container(config, resolve=True)):
            if leaf not in every:
                every[leaf] = next(kind for _, value, kind in kinds(around(leaf, "?")) if value == "?")
    return every


def outcome(leaf: Leaf, value: Any) -> str:
    """Return the line of a refusal; "" if the value is allowed."""
    try:
        check_values(OmegaConf.create(around(leaf, value)))
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    every, counts = found(), Counter()
    for leaf in every:
        for name, value in WRONG.items():
            line = outcome(leaf, value)
            counts[name, bool(line)] += 1
            if "--all" in sys.argv:
                print(f"{'.'.join(leaf[0])} = {name}:", line or "allowed")
    print(f"{'value':12}{'refused':>8}{'allowed':>8}     of {len(every)} leaves")
    for name in WRONG:
        print(f"{name:12}{counts[name, True]:8}{counts[name, False]:8}")
