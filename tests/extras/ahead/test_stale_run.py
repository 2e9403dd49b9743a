"""The staleness of tokens reaches the loss of a run."""

import pytest
from helpers.runs import learned, rows


def test_a_policy_between_is_the_one_that_sampled_until_samples_are_two_versions_old(smoke, tmp_path):
    """rollout.ahead=2: d is 0, 1, 2, 2. Where d is at most 1, p is mu and the correction 1; where it is 2, p is their mean."""
    settings = """rollout.ahead=2 rollout.num_rollouts=4 algo=decoupled algo.old_policy=between eval.every=0
        engine=transformers engine._target_=helpers.slots.Apart callbacks=[samples] callbacks.samples.token_logprobs=true"""
    played = f"{settings} output_dir={tmp_path}/played"
    learned(smoke(*played.split()), {"_target_": "helpers.slots.Halves"})
    run = rows(tmp_path / "played")
    assert [row["rollout/staleness"] for row in run] == [0, 1, 2, 2]
    corrections = [row["loss/correction"] for row in run]
    assert corrections[:2] == [1, 1] and all(abs(one - 1) > 1e-4 for one in corrections[2:])
    for row in run[2:]:  # both are the root of pi / mu
        assert row["loss/ratio"] == pytest.approx(row["loss/correction"], rel=1e-4)
    # a replay is as stale, also one that begins with a later rollout
    (tmp_path / "played" / "rollouts" / "000001.parquet").unlink()
    replayed = f"{settings} rollout.ahead=0 rollout.num_rollouts=3 source=file source.path={tmp_path}/played"
    learned(smoke(*replayed.split(), f"output_dir={tmp_path}/again"), {"_target_": "helpers.slots.Halves"})
    again = rows(tmp_path / "again")[-1]  # whose first rollout had no signal
    assert abs(again["loss/correction"] - 1) > 1e-4
    assert again["loss/ratio"] == pytest.approx(again["loss/correction"], rel=1e-4)
