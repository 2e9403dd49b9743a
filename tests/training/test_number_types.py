"""The table of number types in docs/performance.md is that of real runs."""

import pytest
from helpers.dtypes import PARTS, PRECISIONS, column
from helpers.project import ROOT

LINES = (ROOT / "docs" / "performance.md").read_text().splitlines()
TABLE = {line[2:].split(" | ")[0]: line[2:-2].split(" | ")[1:] for line in LINES if line.startswith("| ")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_page_has_the_number_types_of_a_run(name):
    assert f"| | {' | '.join(PRECISIONS)} |" in LINES
    assert [TABLE[part][[*PRECISIONS].index(name)] for part in PARTS] == column(name)
