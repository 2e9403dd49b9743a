"""EarlyStopping in runs: when it ends them, what counts, and what a resumed run knows of it."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import compose_config
from helpers.runs import rows

from grpo.config.explain import explain
from grpo.extras.early_stopping.early_stopping import EarlyStopping
from grpo.runs.run import Run
from train import train

UNCHANGED = ("optim.optimizer.lr=0", "callbacks=[checkpoint,early_stopping]", "resume=auto")  # all accuracies are equal


def settings(*more: str) -> list[str]:
    return [f"callbacks.early_stopping.{each}" for each in more]


def test_a_resumed_run_knows_how_long_it_has_waited_and_for_what():
    before, after = EarlyStopping(patience=2), EarlyStopping(patience=5)
    before.wait_count, before.best_score = 2, torch.tensor(0.5)
    after.load_state_dict(before.state_dict())
    assert (after.wait_count, after.best_score, after.patience) == (2, 0.5, 5)


def test_a_run_that_no_longer_improves_ends_early_and_well(smoke, tmp_path, caplog):
    """Two evaluations after the one before training."""
    caplog.set_level("INFO")
    more = [*UNCHANGED, *settings("patience=2"), "eval.every=1", "rollout.num_rollouts=9"]
    train(compose_config(*smoke(*more)))
    manifest = Run(tmp_path).manifest
    assert (manifest["status"], manifest["rollouts"]) == ("finished", 2) and len(rows(tmp_path)) == 3
    assert "the run ends early after rollout 2: eval/accuracy has not improved" in caplog.text
    with pytest.raises(SystemExit) as ended:
        train(compose_config(*smoke(*more, f"ckpt_path={tmp_path}")))
    assert ended.value.code == 0 and Run(tmp_path).manifest["status"] == "finished" and len(rows(tmp_path)) == 3


@pytest.mark.parametrize(("mode", "min_delta", "last"), [("min", 0.5, 4), ("min", 0.1, 6), ("max", 0.5, 3)])
def test_better_is_lower_or_higher_by_more_than_min_delta(mode, min_delta, last):
    """patience=2. The values are 10, 9, 8.8, and then 8.6. Nothing is counted in the last rollout of a run, which ends anyway."""
    trainer, batch = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), SimpleNamespace(rollout=0)
    callback = EarlyStopping("rollout/length", mode=mode, min_delta=min_delta, patience=2)
    seen = []
    for value in (10, 9, 8.8, *[8.6] * 5):
        trainer._logger_connector._callback_metrics = {"rollout/length": torch.tensor(value)}
        if not trainer.should_stop:
            callback.on_train_batch_end(trainer, None, None, batch, len(seen))
            seen.append(value)
    assert len(seen) == last and trainer.should_stop
    waited = callback.wait_count
    callback.on_train_batch_end(trainer, None, None, batch, len(seen))
    assert callback.wait_count == waited


@pytest.mark.slow
def test_the_evaluation_of_the_last_rollout_does_not_end_a_run_that_is_extended(smoke, tmp_path):
    more = [*UNCHANGED, *settings("patience=2"), "eval.every=1", "resume.changes=allow"]
    train(compose_config(*smoke(*more, "rollout.num_rollouts=2")))
    train(compose_config(*smoke(*more, "rollout.num_rollouts=9", f"ckpt_path={tmp_path}")))
    assert Run(tmp_path).manifest["rollouts"] == 3


@pytest.mark.slow
def test_only_rollouts_with_an_evaluation_count(smoke, tmp_path):
    more = [*UNCHANGED, *settings("patience=1", "monitor=eval/truncated"), "eval.every=3", "rollout.num_rollouts=9"]
    train(compose_config(*smoke(*more)))
    assert Run(tmp_path).manifest["rollouts"] == 3


@pytest.mark.slow
def test_further_arguments_are_lightnings(smoke, tmp_path):
    more = [*UNCHANGED, "+callbacks.early_stopping.stopping_threshold=-1", "eval.every=2", "rollout.num_rollouts=9"]
    train(compose_config(*smoke(*more)))
    assert Run(tmp_path).manifest["rollouts"] == 1


@pytest.mark.slow
def test_a_run_may_end_by_a_metric_of_rollouts(smoke, tmp_path):
    """No length is shorter than the first by a million tokens, so the run ends after two more rollouts, without evaluations."""
    more = settings("monitor=rollout/length", "mode=min", "min_delta=1e6", "patience=2")
    train(compose_config(*smoke("callbacks=[early_stopping]", *more, "eval.every=0", "rollout.num_rollouts=9")))
    assert Run(tmp_path).manifest["rollouts"] == 3


@pytest.mark.parametrize(
    ("monitor", "every", "learned", "line"),
    [
        ("accuracy", 1, None, "monitor=accuracy is no metric; similar: eval/accuracy, "),
        ("eval/acuracy", 1, 0, "monitor=eval/acuracy is no metric of this run; similar: eval/accuracy, "),
        ("rollout/lenght", 0, 1, "monitor=rollout/lenght is no metric of this run; similar: rollout/length, "),
        ("eval/accuracy", 0, 0, "would never end this run, which evaluates nothing: set eval.every"),
    ],
)
def test_a_run_that_could_never_end_early_is_refused(smoke, tmp_path, monitor, every, learned, line):
    more = ["callbacks=[early_stopping]", *settings(f"monitor={monitor}"), f"eval.every={every}"]
    with pytest.raises(Exception) as refusal:
        train(compose_config(*smoke(*more)))
    assert line in explain(refusal.value, "train")
    assert learned is None or Run(tmp_path).manifest["rollouts"] == learned
