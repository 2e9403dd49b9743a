"""docs/parity.md has a line for every row, and its keys, files and tests exist."""

import re
from collections import Counter
from contextlib import suppress
from importlib import import_module

from conftest import ROOT
from helpers.parity import COMMANDS, TABLE
from helpers.project import holds

PAGE = (ROOT / "docs" / "parity.md").read_text()
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| [RTAM]\d", line)
]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
SIZES = {"R": 27, "T": 39, "A": 46, "M": 21}
OUTSIDE = ("hydra.run.dir", "engine.sample", "metrics.csv")  # Hydra's key, a Protocol's method, a file of a run


def exists(word: str) -> bool:
    """Return whether a dotted word is a key, a file, or an object of a module of ours."""
    if word in OUTSIDE or word in TESTS or holds(word):
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


def test_what_the_page_names_exists():
    lost = []
    for ids, _, here, shown in LINES:
        assert shown or "not here" in here or "no such" in here or "not needed" in here, ids
        for file, name, more in re.findall(r"`(test_\w+\.py)?(?:::)?(test_\w+)?(\.\.\.)?`", shown):
            sources = TESTS.values() if not file else [TESTS[file]] if file in TESTS else []
            if not any(re.search(rf"def {name}{'' if more else chr(92) + 'b'}", source) for source in sources):
                lost.append(f"{ids}: {file} {name}")
        for word in re.findall(r"`([^`]+)`", here):
            keys = [word] if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) else []
            if re.fullmatch(r"[a-z_./]+=[\w./]+( [a-z_./]+=[\w./]+)*", word) and "..." not in word:
                keys = word.split()
            lost += [f"{ids}: {key}" for key in keys if not exists(key)]
    assert not lost


def of_vllm(shown: str) -> bool:
    """Return whether a cell names a test of a file that needs vLLM."""
    return any("pytestmark = pytest.mark.vllm" in TESTS[file] for file in re.findall(r"`(test_\w+\.py)::", shown))


def test_every_row_is_shown_in_one_way_and_the_page_counts_them():
    shown = {refused: {} for refused in (False, True)}
    for command in COMMANDS.values():
        shown[command.refused] |= command.shows
    work, refused = ({row for ids in facts for row in ids.split()} for facts in shown.values())
    needs_gpu, missing, listed = TABLE["gpu"].keys(), TABLE["open"].keys(), {}
    for ids, _, _, tests in LINES:
        for row in ids.split():
            kinds = {
                "work": work - missing,
                "are refused by design": refused,
                "need a GPU": needs_gpu,
                "are open": missing,
            }
            of_row = [kind for kind, rows in kinds.items() if row in rows] or ["need vLLM"] * of_vllm(tests)
            assert len(of_row) == 1, f"{row}: {of_row}"
            listed[row] = of_row[0]
    assert work | refused | needs_gpu | missing <= listed.keys()
    for kind, count in Counter(listed.values()).items():
        assert f"| {count} {kind} |" in PAGE, f"{count} rows {kind}"
    assert f"a part of the row is missing: {', '.join(missing)} |" in PAGE
