"""The commands and blocks of code on the pages."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
PROGRAMS = ("python ", "make ", "pip install", "accelerate ", "vllm ")
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command on a page: in blocks, in lines that are indented by four, and in `code`. A command
    followed by its error is left out, since it shows a mistake."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        text = re.sub(r"^([A-Z_]+=\S+ )+(?=python )", "", ast.get_docstring(ast.parse(text)), flags=re.M)
    text = text.replace("\\\n", " ")
    lines = [re.sub(r"^\$ ", "", line.strip()) for line in re.sub(r".*\n *error: ", "", text).splitlines()]
    lines += re.findall(r"`((?:python|make|pip) [^`]+)`", text)
    for line in lines:
        for part in line.split(" && ") if line.startswith((*PROGRAMS, "OMP_", "git clone")) else ():
            words = [word for word in shlex.split(part.partition("  #")[0], comments=True) if word not in ("...", "&")]
            while words and "=" in words[0]:
                words = words[1:]  # variables of the environment
            if ">" in words:
                words = words[: words.index(">")]
            yield words


def composable(overrides: list[str]) -> list[str]:
    """Return the overrides without Hydra's flags, with the first choice of a sweep, or the start of an interval."""
    parsed = OverridesParser.create().parse_overrides([word for word in overrides if not word.startswith("-")])

    def first(one):
        return one.value().start if one.is_interval_sweep() else next(one.sweep_string_iterator())

    return [f"{one.get_key_element()}={first(one)}" if one.is_sweep_override() else one.input_line for one in parsed]


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and the site make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
