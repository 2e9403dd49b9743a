"""Every architecture is exact, in the fastest layout that is exact for it, or refused; tests/data/architectures.md says which."""

import re
from collections import Counter

import pytest
from conftest import ROOT
from helpers.architectures import ARCHITECTURES, place

PAGE = (ROOT / "docs" / "models.md").read_text()
TABLE = (ROOT / "tests" / "data" / "architectures.md").read_text()
ROWS = re.findall(r"^(\| (\w+)[^|]* \|[^|]*\|[^|]*\|) ([^|]*`\w+Config`[^|]*) \|$", TABLE, re.MULTILINE)
QUICK = "Qwen 3 MoE|Qwen 3.5, text|gpt-oss|DeepSeek V3|Granite 4|Nemotron-H|RWKV|MiniMax|Llama 4, text".split("|")


@pytest.mark.extras("state_layers")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES]
)
def test_an_architecture_is_what_the_page_says(name):
    start, entry = place(name)
    assert [row for row, _, entries in ROWS if entry in entries.split("; ")] == [start]


def test_the_page_has_every_architecture():
    count: Counter[str] = Counter()
    for _, layout, entries in ROWS:
        count[layout] += len(entries.split("; "))
    names = [entry.rpartition(" (")[0] for _, _, entries in ROWS for entry in entries.split("; ")]
    assert sorted(names) == sorted(ARCHITECTURES)
    said = f"{len(names)} architectures: {count['shared_prompt']} are exact in the shared layout, {count['padded']} with padding"
    assert said in " ".join(PAGE.split()) and count["refused"] == 3
