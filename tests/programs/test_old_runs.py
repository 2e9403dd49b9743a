"""A run from before the code was moved, in tests/data/old_run, is read, evaluated, resumed and reported like a new one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, ROOT, compose_config
from test_train import rows

import eval as eval_script
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.objectives.batch import Scores
from grpo.rollout.ahead import Played
from grpo.rollout.types import Limits, Plan, Sample
from grpo.runs.report import write_report
from grpo.runs.runs import Run, curves, load, table
from grpo.training.checkpoints import PlainCheckpoints
from train import train

OLD = EXAMPLES / "old_run"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The run's paths are relative to the root."""
    monkeypatch.chdir(ROOT)


def resumed(checkpoint: str | Path, folder, *overrides: str) -> list[dict[str, float]]:
    """Resume for one more rollout, and return its rows."""
    settings = ["task=gsm8k", f"task.path={EXAMPLES}", "task.prompt=chat", "model=path", "max_tokens=8"]
    settings += [f"model.path={OLD / 'checkpoints' / 'last'}", "rollout.prompts=2", "rollout.group_size=4"]
    settings += [f"ckpt_path={OLD / 'checkpoints' / checkpoint}", "rollout.num_rollouts=3", "forecast=false"]
    settings += ["resume.trust=true", "resume.changes=allow"]
    settings += ["trainer=cpu", "logger=csv", "engine=transformers", f"output_dir={folder}"]
    train(compose_config(*settings, *overrides))
    return rows(folder)


def kinds(value) -> set[type]:
    """Return the classes of the value and of everything in it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    inside = vars(value).values() if hasattr(value, "__dict__") else inside
    return {type(value)}.union(*map(kinds, inside))


def test_its_files_are_read():
    (run,) = load(OLD)
    assert (run.status, run.seed, run.evaluated) == ("finished", 0, [0, 2])
    assert run.overrides["task"] == "gsm8k" and run.config["rollout"]["group_size"] == 4
    assert list(run.metrics.index) == [0, 1, 2] and run.accuracy.tolist() == [0, 1 / 3]
    assert run.policy == OLD / "checkpoints" / "best"
    samples = run.samples()
    assert len(samples) == 2 * 2 * 4 and len(run.evaluations([2])) == 3
    reward = samples.groupby("rollout")["reward"].mean()
    assert reward.tolist() == pytest.approx(run.metrics["rollout/reward"].dropna().tolist())
    assert samples.groupby("rollout")["correct"].mean().tolist() == [0.25, 0] and samples["tokens"].eq(5).all()
    assert run.verdicts()["accuracy"].mean() == 1 / 3
    assert table([run])["best"].item() == 1 / 3 and len(curves([run], "loss/entropy")) == 2


@pytest.mark.parametrize("overrides", [(), ("task=gsm8k", "task.path=tests/data", "task.prompt=chat", "max_tokens=8")])
def test_it_is_evaluated(tmp_path, overrides):
    """With its own configuration, and with today's."""
    given = ("run=tests/data/old_run", *overrides)
    accuracy = eval_script.evaluate(compose_config(*given, f"output_dir={tmp_path}", name="eval"), given)
    assert accuracy == Run(OLD).accuracy.iloc[-1] == 1 / 3
    today, then = Run(tmp_path).evaluations(), Run(OLD).evaluations([2])
    assert today["completion"].tolist() == then["completion"].tolist() and today["item"].equals(then["item"])


def test_it_is_resumed(tmp_path):
    told = resumed("last.ckpt", tmp_path, "optim.optimizer.lr=2e-4", "callbacks=[samples,checkpoint,health]")
    assert [row["step"] for row in told] == [3] and "eval/accuracy" in told[0]
    assert json.loads((tmp_path / "manifest.json").read_text())["rollouts"] == 3
    checkpoint = PlainCheckpoints().load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert checkpoint["callbacks"]["RolloutCallback"]["rollouts"] == 3
    steps = {int(state["step"]) for state in checkpoint["optimizer_states"][0]["state"].values()}
    assert steps == {3}  # the saved moments were loaded


def test_a_rollout_that_was_ahead_is_unpickled(tmp_path):
    checkpoint = torch.load(OLD / "checkpoints" / "ahead.ckpt", weights_only=False)
    plan, played = checkpoint["callbacks"]["RolloutCallback"]["ahead"]
    assert type(plan) is Plan and type(played) is Played and plan.ahead == 1
    assert len(played.groups) == plan.prompts == 2 and all(len(group) == 4 for group in played.groups)
    ours = {Sample, Trajectory, Step, State, Action, Message, Turn, Completion, Reward, Scores, Limits, Sampling}
    assert ours <= kinds([plan, played])
    assert (played.version, played.staleness(2)) == (1, 1)

    more = ("engine._target_=test_ahead.Apart", "rollout.ahead=1", "algo.old_policy=rollout", "optim=sgd")
    alone = shutil.copy(
        OLD / "checkpoints" / "ahead.ckpt", tmp_path
    )  # the configuration beside it has another optimizer
    told = resumed(alone, tmp_path, *more, "callbacks=[samples]", "eval.every=0")
    assert [row["rollout/staleness"] for row in told] == [1]  # it was learned from, not played again
    answers = [sample.trajectory.answer for group in played.groups for sample in group]
    assert Run(tmp_path).samples([3])["completion"].tolist() == answers


def test_its_report_is_written(tmp_path):
    page = write_report(OLD, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "33.3\N{NO-BREAK SPACE}%" in page and "boxed{37}" in page
