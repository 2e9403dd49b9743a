"""Updates whose gradient is not finite are skipped, written and repeated."""

import math

import lightning as L
import pytest
import torch
from conftest import compose_config
from helpers.learning import ADVANTAGES, fresh, make_module, rollout
from helpers.runs import VARIED, rows, state

from grpo.extras.preflight.replay import broken_places, replay
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.runs.run import Run
from grpo.system.errors import UserError
from train import train


@pytest.mark.filterwarnings("error:Detected call of")
def test_skipped_updates_in_a_row_end_the_run(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = fresh(toy)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    module = make_module(policy)
    broken = rollout(rewards=ADVANTAGES * math.inf)
    for _ in range(2):
        metrics = module.training_step(broken, 0)
        assert metrics["loss/skipped"] == 1.0
        assert all(math.isfinite(value) for name, value in metrics.items() if "advantages" not in name)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert module.training_step(rollout(), 0)["loss/skipped"] == 0.0 and module.updates == 3 and module.skipped.row == 0
    for _ in range(2):
        module.training_step(broken, 0)
    with pytest.raises(
        UserError, match=r"update 5 .* no step was made, 3 times in a row; python train\.py replay=skipped/"
    ):
        module.training_step(broken, 0)
    assert len(list((tmp_path / "skipped").glob("*.ckpt"))) == 3


class Breaking(L.Callback):
    """The surrogate divides by zero at the first token of each row, once the policy has moved."""

    broken = False

    def on_before_optimizer_step(self, trainer, module, optimizer):
        Breaking.broken = True


def surrogate(ratio, advantages):
    first = torch.arange(ratio.shape[1], device=ratio.device) == 0
    return -ratio * advantages / torch.where(first & Breaking.broken, 0.0, 1.0)


def test_a_run_goes_on_and_the_update_is_repeated(smoke, tmp_path, capsys, caplog):
    """The policy moves in the first update, so the second one is skipped; its replay names tokens."""
    settings = (
        "algo.num_epochs=2 rollout.num_rollouts=1 eval.every=0 optim.max_skipped=5 callbacks=[checkpoint]".split()
    )
    settings += (
        "+callbacks.breaking={_target_: test_skipped.Breaking}",
        "algo.old_policy=trainer",
        "optim.optimizer.lr=1e-2",
    )
    config = compose_config(*smoke(*settings))
    Breaking.broken = False
    config.task = VARIED
    config.algo.surrogate = {"_target_": "test_skipped.surrogate", "_partial_": True}
    train(config)
    assert rows(tmp_path)[0]["loss/skipped"] == 0.5 and Run(tmp_path).status == "finished"
    steps = {int(moments["step"]) for moments in state(tmp_path)["optimizer_states"][0]["state"].values()}
    assert steps == {1}  # of two updates
    [path] = (tmp_path / "skipped").glob("*.ckpt")
    assert (
        f"update 1 (rollout 1): the gradient is not finite, so no step was made; python train.py replay={path}"
        in caplog.text
    )
    config.replay = str(tmp_path)
    with pytest.raises(UserError, match=r"is no skipped update: give RUN/skipped/UPDATE\.ckpt"):
        replay(config)
    config.replay = str(path)
    capsys.readouterr()
    replay(config)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("update 1, rollout 1: ") and said[0].endswith("gradient norm nan")
    assert "gradients that are not finite: " in said[1] and "tokens with a number that is not finite: " in said[2]
    assert "given nan" not in "".join(said)  # samples that brought no advantages have no fault
    assert int(said[2].rpartition(" ")[2]) > 0 and said[3].startswith("  row ")


def test_a_broken_token_is_told_with_its_own_text(toy):
    """Each row has three tokens of its prompt and three sampled ones; tokens 2 to 5 are system, user, assistant, tool."""
    ids = torch.tensor([[2, 2, 2, 3, 3, 3], [2, 3, 2, 5, 4, 5]])
    mask, finite = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    tokens = TokenBatch(ids, torch.ones_like(ids), mask, finite, torch.tensor([6, 7]))
    loss = torch.tensor([[0.0, 0.0, 0.0], [0.0, torch.nan, 0.0]])
    lines = broken_places(tokens, {"loss": loss}, Pretrained(str(toy)).tokenizer())
    assert [*lines] == ["row 1 (sample 7), token 1 '<|assistant|>': loss nan"]
