"""float16: the loss is scaled, so that small gradients do not become 0, and an update that overflows is skipped and counted."""

import logging
import math

import pytest
import torch
from helpers.learning import ADVANTAGES, fresh, make_module, rollout
from helpers.runs import learned, rows, state, told
from torch import nn, tensor

from grpo.extras.optimizers.loss_scale import LARGEST, LossScale, LossScaling
from grpo.models.pretrained import Pretrained
from grpo.training.trainer import best_on_gpu


def test_the_scale_by_hand():
    """8 doubles after two finite gradients, is halved at each infinite one, and ends at 1, which is not to blame."""
    scale, half = LossScale(LossScaling(8, growth_interval=2)), nn.Linear(1, 1).half()
    half.weight.grad = tensor([[6.0]], dtype=torch.float16)
    assert scale.scaled(tensor(0.5), half).item() == 4.0
    scale.unscale(half.parameters())
    assert half.weight.grad.item() == 0.75
    seen = []
    for finite in (True, True, True, False, True, False, False, False, False, False, True):
        scale.scaled(tensor(0.5), half)
        scale.note(finite)
        seen.append((scale.value, scale.halved, scale.overflows))
    assert seen == [
        *[(8, False, 0), (16, False, 0), (16, False, 0), (8, True, 1), (8, False, 1)],
        *[(4, True, 2), (2, True, 3), (1, True, 4), (1, False, 4), (1, False, 4), (1, False, 4)],
    ]
    resumed, anew = LossScale(LossScaling(8, growth_interval=1)), LossScale(LossScaling(16))
    for one in (resumed, anew):
        one.load_state_dict(scale.state_dict())
    assert (resumed.value, resumed.clean, resumed.overflows) == (1, 1, 4)
    assert (anew.value, anew.overflows) == (16, 4)  # the setting that it begins with is another one
    resumed.scaled(tensor(0.5), half)
    resumed.note(True)
    assert resumed.value == 2  # two clean updates in a row are more than the interval of now


def test_a_loss_that_is_infinite_does_not_excuse_later_gradients():
    scale, half = LossScale(LossScaling(8)), nn.Linear(1, 1).half()
    for loss, value in ((torch.inf, 8), (0.5, 4)):  # the first is not the scale's fault
        scale.scaled(tensor(loss), half)
        scale.note(False)
        assert scale.value == value


def test_the_scale_has_a_largest_value():
    scale, half = LossScale(LossScaling(int(LARGEST / 2), growth_interval=1)), nn.Linear(1, 1).half()
    seen = []
    for _ in range(3):
        scale.scaled(tensor(0.5), half)
        scale.note(True)
        seen.append(scale.value)
    assert seen == [LARGEST] * 3


def test_passes_in_float32_have_no_scale_and_autocast_has():
    scale, whole = LossScale(LossScaling(8)), nn.Linear(1, 1)
    assert scale.scaled(tensor(0.5), whole).item() == 0.5
    scale.note(False)
    assert not scale.halved and scale.value == 8
    for dtype, scaled in ((torch.bfloat16, 0.5), (torch.float16, 4.0)):
        with torch.autocast("cpu", dtype):
            assert scale.scaled(tensor(0.5), whole).item() == scaled


def gradient(policy, scale: int | None = None) -> torch.Tensor:
    """Return the gradient of a rollout whose advantages are small, which a step at learning rate 1 takes from the masters."""
    module = make_module(policy, lr=1.0)
    if scale:
        module.scale = LossScale(LossScaling(scale))
    learned = module.optimizers().param_groups[0]["params"]
    before = torch.cat([p.detach().float().flatten() for p in learned])
    metrics = module.training_step(rollout(rewards=ADVANTAGES / 1e5), 0)
    assert metrics["loss/skipped"] == 0 and metrics.get("loss/scale") == scale
    return before - torch.cat([p.detach().float().flatten() for p in learned])


def test_the_scale_keeps_the_gradients_that_float16_would_lose(toy):
    """A gradient is a sum of numbers of which most are below 6e-8; with the scale it is that of float32 up to rounding."""
    exact = gradient(fresh(toy))
    kept, lost = (gradient(Pretrained(str(toy), dtype="float16").model(), scale) for scale in (65536, 1))
    assert (kept - exact).norm() < 0.01 * exact.norm() and (lost - exact).norm() > 0.5 * exact.norm()


def test_an_update_that_overflows_is_skipped_and_counted(toy, tmp_path, monkeypatch, caplog):
    """Nothing is written, and it does not count among the updates in a row after which a run ends: the scale is to blame."""
    monkeypatch.chdir(tmp_path)
    policy = Pretrained(str(toy), dtype="float16").model()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    module = make_module(policy)
    module.scale = LossScale(LossScaling(2**40))
    with caplog.at_level(logging.INFO):
        for number in range(4):
            metrics = module.training_step(rollout(number), 0)
            assert (metrics["loss/overflowed"], metrics["loss/skipped"]) == (1, 0)
            assert metrics["loss/scale"] == 2 ** (40 - number) and "loss/grad_norm" not in metrics
    assert "loss scale 1.09951e+12 is too large for float16: no step" in caplog.messages[0]
    assert "(4 such updates so far)" in caplog.messages[-1]
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert module.updates == 4 and module.skipped.row == 0 and not (tmp_path / "skipped").exists()
    module.scale.value = 65536.0
    metrics = module.training_step(rollout(), 0)
    assert metrics["loss/overflowed"] == 0 and 0 < metrics["loss/grad_norm"] < math.inf


def test_a_gpu_without_bfloat16_takes_float16():
    """V100, T4, A100, H100."""
    capabilities = [(7, 0), (7, 5), (8, 0), (9, 0)]
    assert [*map(best_on_gpu, capabilities)] == ["16-mixed", "16-mixed", "bf16-mixed", "bf16-mixed"]


def test_16_true_names_the_parameters_type(smoke):
    assert "set model.dtype=float16, or trainer.precision=16-mixed" in told(*smoke("trainer.precision=16-true"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trainer.precision=16-mixed", "trainer.precision=16-true model.dtype=float16"])
def test_a_run_in_float16_resumes_bit_exactly(smoke, toy, tmp_path, how):
    """The first scale is far too large: the first updates are skipped, also after the resumption, which has the scale."""

    def run(folder: str, rollouts: int, *more: str) -> None:
        settings = (
            f"trainer=cpu {how} callbacks=[checkpoint] callbacks.checkpoint.every=4 rollout.num_rollouts={rollouts}"
        )
        settings += (
            f" algo.num_epochs=2 optim.loss_scale.initial={2**27} resume.changes=allow output_dir={tmp_path / folder}"
        )
        learned(smoke(*settings.split(), *more))

    run("straight", 8)
    run("first", 4)
    run("resumed", 8, f"ckpt_path={tmp_path / 'first'}")
    straight, resumed = state(tmp_path / "straight"), state(tmp_path / "resumed")
    scale = straight["progress"]["loss_scale"]
    assert straight["progress"] == resumed["progress"] and 8 < scale["overflows"] < 14
    assert scale["value"] == 2 ** (27 - scale["overflows"])
    of_rollouts = [row["loss/overflowed"] for row in rows(tmp_path / "straight")[1:]]
    assert of_rollouts[:4] == [1, 1, 1, 1] and of_rollouts[-1] == 0 and sum(of_rollouts) == scale["overflows"] / 2
    assert rows(tmp_path / "straight")[5:] == rows(tmp_path / "resumed")
    for name, weight in straight["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name
    start = Pretrained(str(toy), dtype="float16").model().state_dict()
    assert any(
        not torch.equal(start[name.removeprefix("policy.")], x.half()) for name, x in straight["state_dict"].items()
    )
