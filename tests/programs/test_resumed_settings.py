"""A run resumed with other settings: each is in effect in the first rollout, update and evaluation after it."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import EXAMPLES
from helpers.runs import learned, rows

from grpo.training.checkpoints import PlainCheckpoints

pytestmark = pytest.mark.slow
BASE = """task=gsm8k model=path debug=smoke forecast=false preflight=off max_tokens=8 optim.optimizer.lr=1e-3
    callbacks=[checkpoint,samples] callbacks.checkpoint.every=1 rollout.num_rollouts=1 eval.limit=2
    optim.schedule.name=linear algo.kl.coef=0.01 algo.entropy.coef=0.01""".split()


@pytest.fixture(scope="module")
def resumed(toy, tmp_path_factory):
    """A function that resumes a run of one rollout with other settings, and returns the new folder. The old one is `first`."""
    place = tmp_path_factory.mktemp("runs")

    def run(name: str, *more: str) -> Path:
        (place / name).mkdir()
        learned([*BASE, f"task.path={EXAMPLES}", f"model.path={toy}", f"output_dir={place / name}", *more])
        return place / name

    run("first")
    return lambda name, *more: run(
        name, f"ckpt_path={place}/first", "rollout.num_rollouts=2", "resume.changes=allow", *more
    )


@pytest.fixture(scope="module")
def before(resumed):
    """The folder of the run that is resumed with its own settings."""
    return resumed("before")


def second(folder: Path) -> dict[str, float]:
    return next(row for row in rows(folder) if row["step"] == 2)


def completions(folder: Path) -> list[str]:
    return pd.read_parquet(folder / "rollouts/000002.parquet")["completion"].tolist()


def test_the_algorithm_and_its_updates(resumed, before):
    """With two updates for each rollout the run has four, and the linear rate of the last two is a half and a quarter of 1e-3. In
    the second one every ratio is outside of a clip of 1e-9."""
    changed = "algo.entropy.coef=0.2 algo.kl.coef=0 algo.num_epochs=2 algo.surrogate.low=1e-9 algo.surrogate.high=1e-9"
    folder = resumed("algo", *changed.split())
    then, now = second(before), second(folder)
    assert (then["loss/entropy_coef"], now["loss/entropy_coef"]) == (0.01, 0.2)
    assert "loss/kl" in then and "loss/kl" not in now
    assert now["lr"] == pytest.approx(0.375e-3)
    assert then["loss/clip_fraction_low"] + then["loss/clip_fraction_high"] == 0
    assert now["loss/clip_fraction_low"] + now["loss/clip_fraction_high"] > 0.4
    assert completions(folder) == completions(before)


def test_the_optimizer_and_its_schedule_and_the_seed(resumed, before):
    """AdamW's second step worked by hand: the rate is linear over three rollouts, so 2/3 of the new one is left. With the new
    beta1 = 0 the first moment is the gradient g, which has the new norm; the second one is 0.99 v + 0.01 g^2 with the v of the
    checkpoint."""
    changed = "lr=1e-4 weight_decay=0.5 betas=[0.0,0.99]".split()
    more = "optim.max_grad_norm=0.01", "rollout.num_rollouts=3", "seed=1"
    folder = resumed("optimizer", *(f"optim.optimizer.{one}" for one in changed), *more)
    lr = 1e-4 * 2 / 3
    assert second(folder)["lr"] == pytest.approx(lr)
    files = folder.parent / "first/checkpoints/00001.ckpt", folder / "checkpoints/00002.ckpt"
    then, now = map(PlainCheckpoints().load_checkpoint, files)
    names = now["optimizer_states"][0]["param_groups"][0]["param_names"]
    moments = [saved["optimizer_states"][0]["state"] for saved in (then, now)]
    for i, name in enumerate(names):
        g, v = moments[1][i]["exp_avg"], moments[1][i]["exp_avg_sq"]
        torch.testing.assert_close(v, 0.99 * moments[0][i]["exp_avg_sq"] + 0.01 * g.square())
        old, new = (saved["state_dict"][f"policy.{name}"] for saved in (then, now))
        step = g / ((v / (1 - 0.99**2)).sqrt() + 1e-8)
        torch.testing.assert_close(new, old * (1 - lr * 0.5) - lr * step, atol=1e-7, rtol=0)
    norm = torch.stack([state["exp_avg"].norm() for state in moments[1].values()]).norm()
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert completions(folder) != completions(before)


def test_rollouts_evaluations_and_callbacks(resumed):
    """Four greedy samples of one prompt, in place of two of each of two prompts; three samples of one held-out question."""
    rollout = "rollout.prompts=1 rollout.group_size=4 rollout.sampling.top_k=1"
    evaluation = "eval.limit=1 eval.samples=3 eval.sampling.temperature=1"
    shown = "callbacks.samples.token_logprobs=true callbacks.checkpoint.history=1"
    folder = resumed("rollout", *f"{rollout} {evaluation} {shown}".split())
    texts = completions(folder)
    assert len(texts) == 4 and len({*texts}) == 1
    assert len(pd.read_parquet(folder / "evaluations/000002.parquet")) == 3
    assert (folder / "checkpoints/step_000002").is_dir()
    assert any("logprob" in name for name in pd.read_parquet(folder / "rollouts/000002.parquet"))
