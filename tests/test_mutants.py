"""The planted faults of benchmarks/mutants.yaml fit the code as it is."""

import pytest
from mutants import faults


def test_each_fault_has_one_place_and_tests_beside_it():
    found = faults()  # raises for one whose old text does not occur once, or whose tests are not there
    assert len({(one.file, one.old, one.new) for one in found}) == len(found) > 60


@pytest.mark.slow
def test_each_fault_changes_a_function():
    """Else it is not planted: text that is no Python ends the whole table's run, and code outside functions has run before."""
    assert [one.name for one in faults() if not one.codes()] == []
