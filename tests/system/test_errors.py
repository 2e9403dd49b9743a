"""Refusals in one line."""

import pytest

from grpo.system.errors import UserError, check_least, oneof


def test_a_word_that_is_not_allowed():
    oneof("optim.layout", "packed", ("padded", "packed"))
    with pytest.raises(UserError) as refusal:
        oneof("optim.layout", "ragged", iter(("padded", "packed")))
    assert str(refusal.value) == "optim.layout=ragged is not one of padded, packed"


def test_a_number_that_is_too_small():
    for value in (1, 2.5, None):
        check_least("eval.limit", value, 1)
    with pytest.raises(UserError) as refusal:
        check_least("eval.limit", 0, 1, ", or null for all rows")
    assert str(refusal.value) == "eval.limit=0 must be at least 1, or null for all rows"
