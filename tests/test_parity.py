"""docs/parity.md has a line for every row, and its keys, files and tests exist."""

import functools
import itertools
import re
from contextlib import suppress
from importlib import import_module

import pytest
from conftest import ROOT, compose_config
from omegaconf import OmegaConf
from parity import table

PAGE = (ROOT / "docs" / "parity.md").read_text()
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| [RTAM]\d", line)
]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
SIZES = {"R": 27, "T": 39, "A": 46, "M": 21}
OPTIONS = (
    "engine=vllm",
    "engine=vllm_server",
    "task=musique",
    "task=gsm8k logger=wandb algo/kl=loss algo/advantage=atropos adapter=lora",
)


@functools.cache
def configs() -> list:
    return [compose_config("output_dir=.", *chosen.split()) for chosen in OPTIONS]


def exists(word: str) -> bool:
    """Return whether a dotted word is a key, a file, or an object of a module of ours."""
    if any(OmegaConf.select(config, word, default=LINES) is not LINES for config in configs()):
        return True
    module, _, name = word.rpartition(".")
    for room in ("", "grpo.", "grpo.rewards."):
        with suppress(ImportError):
            if hasattr(import_module(f"{room}{module}"), name) or import_module(f"{room}{word}"):
                return True
    return any((folder / word).exists() for folder in (ROOT, ROOT / "docs", ROOT / "grpo"))


def test_every_row_has_a_line():
    listed = [row for ids, *_ in LINES for row in ids.split()]
    assert sorted(listed) == sorted(f"{system}{i:02}" for system, size in SIZES.items() for i in range(1, size + 1))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_what_a_line_names_exists(line):
    _, _, here, shown = line
    assert shown or "not here" in here or "no such" in here or "not needed" in here
    for file, name, more in re.findall(r"`(test_\w+\.py)?(?:::)?(test_\w+)?(\.\.\.)?`", shown):
        assert not file or file in TESTS, file
        if name:
            sources = [TESTS[file]] if file else TESTS.values()
            assert any(re.search(rf"def {name}{'' if more else chr(92) + 'b'}", source) for source in sources), name
    words = re.findall(r"`([^`]+)`", here)
    outside = ("hydra.run.dir", "engine.sample", "metrics.csv")  # Hydra's key, a Protocol's method, a file of a run
    dotted = [word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word not in outside]
    assert not [word for word in dotted if not exists(word)]
    for word in words:
        if re.fullmatch(r"[a-z_./]+=[\w./]+( [a-z_./]+=[\w./]+)*", word) and "..." not in word:
            named = {"engine.launch": ["engine=vllm_server"], "engine.sleeps": ["engine=vllm"]}
            compose_config("output_dir=.", *named.get(word.partition("=")[0], []), *word.split())


def rows(*tables) -> set[str]:
    return {row for ids in itertools.chain(*tables) for row in ids.split()}


def test_every_row_is_shown_in_one_way_and_the_page_counts_them():
    missing = rows(table.OPEN)
    kinds = {
        "work": rows(*(command.shows for command in table.WORKS.values())) - missing,
        "are refused by design": rows(table.REFUSED),
        "need vLLM": rows(table.VLLM),
        "need a GPU": rows(table.GPU),
        "are open": missing,
    }
    listed = [row for ids, *_ in LINES for row in ids.split()]
    assert sorted(row for of_kind in kinds.values() for row in of_kind) == sorted(listed)
    for kind, of_kind in kinds.items():
        assert f"| {len(of_kind)} {kind} |" in PAGE, f"{len(of_kind)} rows {kind}"
    assert (
        f"a part of the row is missing: {', '.join(sorted(missing, key=lambda row: ('RTAM'.index(row[0]), row)))} |"
        in PAGE
    )
    for test in table.VLLM.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in TESTS[file] and "pytestmark = pytest.mark.vllm" in TESTS[file], test
