"""A tree without an appendix: benchmarks/without.py deletes one and tries what is left."""

import pytest
from without import appendices, gone_with, without

pytestmark = pytest.mark.extras


def test_what_needs_an_appendix_goes_with_it():
    known = appendices()
    assert len(known) > 20 and all(needed <= known.keys() for needed in known.values())
    for name, needed in known.items():
        assert all(name in gone_with([one]) for one in needed)


@pytest.mark.slow
def test_a_tree_without_launch_files():
    assert not any(without(["launch"], ("imports", "composes")).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", appendices())
def test_any_appendix_may_be_deleted(name):
    """`python benchmarks/without.py all` also runs the quick tests that remain, which takes minutes for each."""
    assert not any(without([name], ("imports", "composes", "trains")).values())
