"""Every architecture is exact, in the fastest layout that is exact for it, or refused; docs/models.md says which."""

import re

import pytest
from conftest import ROOT
from helpers.architectures import ARCHITECTURES, row

PAGE = (ROOT / "docs" / "models.md").read_text()
QUICK = "Qwen 3 MoE|Qwen 3.5, text|gpt-oss|DeepSeek V3|Granite 4|Nemotron-H|RWKV|MiniMax|Llama 4, text".split("|")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES]
)
def test_an_architecture_is_what_the_page_says(name):
    assert row(name) in PAGE.splitlines()


def test_the_page_has_every_architecture():
    rows = re.findall(r"^\| ([^|]+) \| `\w+Config` \| (\w+)", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(ARCHITECTURES)
    layouts = [layout for _, layout in rows]
    count = {layout: layouts.count(layout) for layout in dict.fromkeys(layouts)}
    said = f"{len(rows)} architectures: {count['shared_prompt']} are exact in the shared layout, {count['padded']} with padding"
    assert said in " ".join(PAGE.split()) and count["refused"] == 2
