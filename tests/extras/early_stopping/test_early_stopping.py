"""EarlyStopping of a resumed run."""

from grpo.extras.early_stopping.early_stopping import EarlyStopping


def test_patience_is_that_of_now():
    before, after = EarlyStopping(patience=2), EarlyStopping(patience=5)
    before.wait_count = 2
    after.load_state_dict(before.state_dict())
    assert (after.wait_count, after.patience) == (2, 5)
