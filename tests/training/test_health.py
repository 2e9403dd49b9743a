"""Warnings: given at the bounds that they name, once, and not again after the run is resumed."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import compose_config

from grpo.system.errors import AlarmError
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.health import Health
from train import train


def said(health: Health, caplog, *values: dict[str, float]) -> list[str]:
    caplog.clear()
    module = SimpleNamespace(policy=torch.nn.Linear(2, 2))
    for rollout, metrics in enumerate(values):
        health.on_train_batch_end(None, module, {}, RolloutBatch(rollout, metrics=metrics), 0)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("metric", "well", "unwell", "words"),
    [
        ("rollout/logprob_gap", 0.03, 0.031, "old weights"),
        ("rollout/truncated", 0.5, 0.51, "raise max_tokens"),
        ("rollout/timeout", 0.02, 0.021, "teach nothing"),
        ("rollout/error", 0.0, 0.01, "the grader failed"),
        ("rollout/staleness", 1.0, 1.01, "several rollouts old"),
        ("loss/ratio", 1.2, 1.21, "moves far"),
        ("loss/ratio", 0.8, 0.79, "moves far"),
        ("loss/approx_kl", 0.5, 0.51, "has left the one that sampled"),
        ("loss/kl", 0.5, 0.51, "algo.kl"),
        ("loss/clip_fraction_high", 0.3, 0.31, "beyond the bound"),
        ("loss/clip_fraction_low", 0.3, 0.31, "beyond the bound"),
    ],
)
def test_a_number_out_of_its_range_is_told_once(metric, well, unwell, words, caplog):
    health = Health()
    assert said(health, caplog, {metric: well}, {}) == []
    (line,) = said(health, caplog, {metric: unwell}, {metric: unwell})
    assert line.startswith(f"rollout 1: {metric} is {unwell:.3g}, ") and words in line
    assert said(health, caplog, {metric: unwell}) == []


def test_groups_without_signal_are_told_when_they_go_on(caplog):
    none, some = {"rollout/effective_groups": 0.0}, {"rollout/effective_groups": 0.1}
    assert said(Health(), caplog, none, none, some, none, none) == []
    assert said(Health(), caplog, none, none, none)[0].startswith(
        "rollout 3: rollout/effective_groups is 0, below 1e-09"
    )


def test_old_weights_are_no_news_where_the_rollout_was_played_ahead(caplog):
    def told(gap: float, staleness: float) -> list[str]:
        return said(Health(), caplog, {"rollout/logprob_gap": gap, "rollout/staleness": staleness})

    assert told(0.3, 1.0) == []
    assert "is 0.31, above 0.3: engine and trainer disagree" in told(0.31, 1.0)[0]
    assert "is 0.1, above 0.03: engine and trainer disagree" in told(0.1, 0.0)[0]


def test_what_was_said_stays_said(caplog):
    health, resumed = Health(), Health(ignore=["loss/ratio"])
    said(health, caplog, {"loss/kl": 9.0})
    resumed.load_state_dict(health.state_dict())
    assert said(resumed, caplog, {"loss/kl": 9.0, "loss/ratio": 9.0}) == []


@pytest.mark.parametrize(
    ("metric", "watched", "stopped"),
    [("rollout/logprob_gap", 0.9, 1.1), ("loss/approx_kl", 9.0, 11.0), ("rollout/reward", 1e5, -1e30)],
)
def test_a_number_far_out_of_its_range_stops_the_run(metric, watched, stopped, caplog):
    assert len(said(Health(), caplog, {metric: watched})) == (metric != "rollout/reward")
    with pytest.raises(AlarmError, match=f"rollout 1: {metric} is .*alarms=warn") as alarm:
        said(Health(), caplog, {metric: stopped})
    assert alarm.value.exit_code == 4
    assert len(said(Health(alarms="warn"), caplog, {metric: stopped})) == 1
    assert len(said(Health(ignore=[metric]), caplog, {metric: stopped})) <= 1


def test_a_weight_that_is_not_finite_never_reaches_a_checkpoint(smoke, tmp_path):
    """The step of rollout 2 poisons a weight; the checkpoint of rollout 1 stays the last one."""
    more = ("callbacks=[health,checkpoint]", "callbacks.checkpoint.every=1", "rollout.num_rollouts=3")
    poison = "+callbacks.poison={_target_: test_health.Poison}"
    with pytest.raises(AlarmError, match="rollout 2: 1 of the policy"):
        train(compose_config(*smoke(*more, "callbacks.health.ignore=[rollout/truncated]", poison)))
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["callbacks"]["RolloutCallback"]["rollouts"] == 1
    assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())


class Poison(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        if module.updates == 1:
            module.policy.model.norm.weight.data[0] = torch.nan
