"""The table of number types in docs/performance.md is that of real runs."""

import pytest
from helpers.dtypes import table
from helpers.project import ROOT


@pytest.mark.slow
def test_the_page_has_the_number_types_of_runs():
    assert "\n".join(table()) in (ROOT / "docs" / "performance.md").read_text()
