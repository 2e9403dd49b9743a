"""Minutes of real training: the demos learn, real rows of GSM8K run."""

import pytest
from conftest import REAL_DATA
from helpers import programs

from grpo.runs.run import Run

pytestmark = pytest.mark.slow


def command(*arguments: str) -> str:
    done = programs.command(*arguments, seconds=3600)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    command("train.py", "rollout.num_rollouts=12", "eval.every=12", f"hydra.run.dir={folder}")
    return folder


def test_the_demo_learns(demo):
    """Held-out accuracy more than doubles in 12 rollouts, because the policy learns to reason longer."""
    table = Run(demo).metrics
    accuracy, reward, length = (
        table["eval/accuracy"].dropna(),
        table["rollout/reward"].dropna(),
        table["rollout/length"].dropna(),
    )
    assert 0.10 <= accuracy.iloc[0] <= 0.30
    assert accuracy.iloc[-1] >= 0.62
    assert reward.iloc[-6:].mean() > reward.iloc[:4].mean() + 0.15
    assert length.iloc[0] < 16 and length.iloc[-5:].mean() > 22
    assert table["rollout/logprob_gap"].max() < 1e-4
    assert table["eval/format"].dropna().min() > 0.95


def test_its_samples_are_whole_problems(demo):
    table = Run(demo).samples()
    assert len(table) == 12 * 16 * 8
    assert set(table["reward"]) == {0.0, 1.0}
    one = table[table["rollout"] == 12].groupby("prompt_index")
    assert (one["advantage"].sum().abs() < 1e-4).all()  # centred in each group


def test_the_curve_is_drawn(demo, tmp_path):
    from grpo.extras.report.run_plots import metrics

    command("-m", "grpo.plots", str(demo), "--out", str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    (line,) = metrics([Run(demo)], ["eval/accuracy"]).axes[0].lines
    assert list(line.get_ydata()) == list(Run(demo).accuracy)


def test_the_demo_with_a_tool_learns_to_call_it(tmp_path):
    """Held-out accuracy goes from nearly none to most in 15 rollouts, because the policy calls until it has the answer."""
    sizes = ("rollout.num_rollouts=15", "eval.every=15", "eval.limit=100")
    command("train.py", "task=calculator", *sizes, f"hydra.run.dir={tmp_path}")
    table = Run(tmp_path).metrics
    accuracy, calls, reward = (
        table[name].dropna() for name in ("eval/accuracy", "rollout/tool_calls", "rollout/reward")
    )
    assert accuracy.iloc[0] <= 0.3
    assert accuracy.iloc[-1] >= 0.7
    assert calls.iloc[0] < 1.2 and calls.iloc[-5:].mean() > 2
    assert reward.iloc[-5:].mean() > reward.iloc[:3].mean() + 0.25
    assert table["rollout/logprob_gap"].max() < 1e-4
    assert table["eval/tool_calls"].dropna().iloc[-1] > 2


def test_eval_agrees_with_the_last_evaluation_of_the_run(demo, tmp_path):
    said = command("eval.py", f"run={demo}/checkpoints/last.ckpt", "eval.limit=200", f"hydra.run.dir={tmp_path}")
    accuracy = Run(demo).metrics["eval/accuracy"].dropna().iloc[-1]
    assert f"{100 * accuracy:.1f} %" in said


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no GSM8K rows on this machine")
def test_gsm8k_goes_the_same_way(tmp_path):
    """8 rollouts on real rows and an evaluation on 40. The tiny model cannot solve them; only the way through counts."""
    sizes = ("rollout.num_rollouts=8", "eval.every=8", "eval.limit=40")
    command("train.py", "experiment=gsm8k_tiny", *sizes, f"task.path={REAL_DATA}", f"hydra.run.dir={tmp_path}")
    table = Run(tmp_path).metrics
    assert list(table.index) == list(range(9))
    assert table["eval/accuracy"].dropna().index.tolist() == [0, 8]
    assert table["loss/grad_norm"].max() > 0 and table["rollout/logprob_gap"].max() < 1e-4
    trained = Run(tmp_path).samples()
    assert len(trained) == 8 * 4 * 8
    assert set(trained["reward"].round(1)) <= {0.0, 0.1, 1.0, 1.1} and len(set(trained["reward"])) > 1
    evaluated = Run(tmp_path).evaluations([8])
    assert len(evaluated) == 40 and "ducks lay 16 eggs" in evaluated["prompt"][0]
