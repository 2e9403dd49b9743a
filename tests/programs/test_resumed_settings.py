"""A run of one rollout is resumed with other settings: each is in effect in the second rollout, its update and its evaluation."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import EXAMPLES
from helpers.runs import VARIED, learned, rows
from helpers.slots import Apart

from grpo.training.checkpoints import PlainCheckpoints

pytestmark = pytest.mark.slow
BASE = """task=gsm8k model=path debug=smoke forecast=false preflight=off max_tokens=8 optim.optimizer.lr=1e-3
    callbacks=[checkpoint,samples] callbacks.checkpoint.every=1 rollout.num_rollouts=1 eval.limit=2 engine=transformers
    optim.schedule.name=linear algo.kl.coef=0.01 algo.entropy.coef=0.01 optim.groups={*norm*:{lr:2e-3}}""".split()


@pytest.fixture(scope="module")
def resumed(toy, tmp_path_factory):
    """A function that resumes a run of one rollout with other settings, and returns the new folder. The old one is `first`."""
    place = tmp_path_factory.mktemp("runs")

    def run(name: str, *more: str, task=VARIED) -> Path:
        (place / name).mkdir()
        learned([*BASE, f"task.path={EXAMPLES}", f"model.path={toy}", f"output_dir={place / name}", *more], task)
        return place / name

    run("first")
    again = f"ckpt_path={place}/first", "rollout.num_rollouts=2", "resume.changes=allow"
    return lambda name, text="", **task: run(name, *again, *text.split(), **task)


@pytest.fixture(scope="module")
def before(resumed):
    """The folder of the run that is resumed with its own settings."""
    return resumed("before")


def second(folder: Path) -> dict[str, float]:
    """Return the metrics of the second rollout."""
    return next(row for row in rows(folder) if row["step"] == 2)


def sampled(folder: Path, column: str = "completion") -> list:
    """Return a column of the samples of the second rollout."""
    return pd.read_parquet(folder / "rollouts/000002.parquet")[column].tolist()


def learning(folder: Path, rollout: int = 2) -> list[tuple[str, dict, torch.Tensor]]:
    """Return the name, the moments and the values of each parameter after a rollout."""
    saved = PlainCheckpoints().load_checkpoint(folder / f"checkpoints/{rollout:05d}.ckpt")
    [optimizer] = saved["optimizer_states"]
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    return [(name, optimizer["state"][i], saved["state_dict"][f"policy.{name}"]) for i, name in enumerate(names)]


def test_a_tenth_of_the_learning_rate_makes_a_tenth_of_the_step(resumed, before):
    """A half of the linear rate is left. The samples, the gradient and both moments are the same ones; the group of the norms has
    a rate of its own, which stays."""
    folder = resumed("rate", "optim.optimizer.lr=1e-4")
    assert (second(before)["lr"], second(folder)["lr"]) == pytest.approx((0.5e-3, 0.5e-4))
    assert second(before)["loss/grad_norm"] == second(folder)["loss/grad_norm"] > 0
    assert sampled(before) == sampled(folder)
    states = learning(folder.parent / "first", 1), learning(before), learning(folder)
    for (name, _, start), (_, moments, large), (_, same, small) in zip(*states, strict=True):
        assert all(torch.equal(moments[key], same[key]) for key in moments) and moments["step"] == 2, name
        part = 1 if "norm" in name else 10
        torch.testing.assert_close(part * (small - start), large - start, atol=2e-6, rtol=1e-3)
        assert not torch.equal(large, start)


def test_a_step_of_adamw_by_hand(resumed):
    """Two thirds of the rate over three rollouts are left. With beta1 = 0 the first moment is the gradient g, which has the new
    norm; the second one is 0.9 v + 0.1 g^2 with the v of the checkpoint, of which two steps have a share of 1 - 0.9^2."""
    changed = "optim.optimizer.lr=1e-4 optim.optimizer.weight_decay=0.5 optim.optimizer.betas=[0.0,0.9]"
    more = "optim.groups={*norm*:{lr:3e-4}} optim.max_grad_norm=0.01 rollout.num_rollouts=3"
    folder = resumed("adamw", f"{changed} {more}")
    squares = 0.0
    for (name, then, old), (_, now, new) in zip(learning(folder.parent / "first", 1), learning(folder), strict=True):
        g, v, lr = now["exp_avg"], now["exp_avg_sq"], (3e-4 if "norm" in name else 1e-4) * 2 / 3
        torch.testing.assert_close(v, 0.9 * then["exp_avg_sq"] + 0.1 * g.square())
        step = g / ((v / (1 - 0.9**2)).sqrt() + 1e-8)
        torch.testing.assert_close(new, old * (1 - lr * 0.5) - lr * step, atol=2e-7, rtol=0)
        squares += float(g.double().square().sum())
    assert squares**0.5 == pytest.approx(0.01, rel=1e-3)
    assert [row["step"] for row in rows(folder)] == [2, 3]


def test_the_schedule_and_the_entropy_bonus(resumed, before):
    """Three quarters of four updates are a warm-up: the second one has a third of the rate. The samples are the same ones, and
    the gradient is another one."""
    folder = resumed("bonus", "rollout.num_rollouts=4 optim.warmup_ratio=0.75 algo.entropy.coef=1")
    assert second(folder)["lr"] == pytest.approx(1e-3 / 3)
    assert sampled(folder) == sampled(before)
    assert second(folder)["loss/grad_norm"] != pytest.approx(second(before)["loss/grad_norm"], rel=1e-3)


def test_the_updates_of_a_rollout_their_clip_and_no_kl(resumed, before):
    """With two updates for each rollout the run has four, and the linear rate of the last two is a half and a quarter of 1e-3. In
    the second one every ratio is outside of a clip of 1e-9. Without a KL there is no reference to compare with."""
    changed = "algo.num_epochs=2 algo.surrogate.low=1e-9 algo.surrogate.high=1e-9 algo.kl.coef=0"
    folder = resumed("clip", changed)
    then, now = second(before), second(folder)
    assert now["lr"] == pytest.approx(0.375e-3)
    assert then["loss/clip_fraction_low"] + then["loss/clip_fraction_high"] == 0
    assert now["loss/clip_fraction_low"] + now["loss/clip_fraction_high"] > 0.4
    assert "loss/kl" in then and "loss/kl" not in now
    assert sampled(folder) == sampled(before)


def test_seeds(resumed, before):
    """Other samples of the same prompts; with the seed of their order, other prompts. One pass over four rows is two rollouts."""
    folder = resumed("seed", "seed=1 data_seed=0")
    assert sampled(folder, "prompt") == sampled(before, "prompt") and sampled(folder) != sampled(before)
    folder = resumed("order", "data_seed=2 rollout.epochs=1 rollout.num_rollouts=9")
    assert {*sampled(folder, "prompt")} != {*sampled(before, "prompt")}
    assert [(row["step"], row["lr"]) for row in rows(folder)] == [(2, pytest.approx(0.5e-3))]


def test_rollouts_evaluations_and_callbacks(resumed):
    """Four samples of one prompt in place of two of each of two, all the same at a temperature near 0; three samples of one
    held-out question."""
    rollout = "rollout.prompts=1 rollout.group_size=4 rollout.sampling.temperature=1e-4 max_tokens=5"
    evaluation = "eval.limit=1 eval.samples=3 eval.sampling.temperature=1"
    shown = "callbacks.samples.token_logprobs=true callbacks.checkpoint.history=1"
    folder = resumed("rollout", f"{rollout} {evaluation} {shown}")
    assert len(sampled(folder)) == 4 and len({*sampled(folder)}) == 1
    assert [len(ids) for ids in sampled(folder, "token_ids")] == [5] * 4
    assert len(pd.read_parquet(folder / "evaluations/000002.parquet")) == 3
    assert (folder / "checkpoints/step_000002").is_dir()


def test_rows_and_the_engine(resumed, tmp_path):
    """Another file of questions, in another form of prompt, and an engine with a copy of the weights, those after one rollout."""
    for split, numbers in {"train": range(4), "test": range(4, 6)}.items():
        lines = [f'{{"question": "Add {i} to {i}.", "answer": "#### {2 * i}"}}\n' for i in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    task = VARIED | {"path": str(tmp_path), "prompt": "zero_shot"}
    folder = resumed("rows", "engine._target_=helpers.slots.Apart", task=task)
    assert all("Add " in str(prompt) and "lamps" not in str(prompt) for prompt in sampled(folder, "prompt"))
    assert Apart.loads[0] == 1 and {*Apart.sampled} >= {1}
