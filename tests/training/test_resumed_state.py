"""A checkpoint gives what was learned or counted to a run with other settings, and never a setting."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from helpers.learning import OPTIONS, fresh, make_module
from hydra.utils import instantiate
from torch import nn
from torch.optim import SGD, Optimizer

from grpo.extras.health.callback import Health
from grpo.extras.optimizers.loss_scale import LossScaling
from grpo.objectives.entropy import EntropyBonus
from grpo.rollout.draw import Everything
from grpo.rollout.types import Plan
from grpo.system.errors import UserError
from grpo.system.seeds import everything, set_everything
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.measure import Recorder
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.optimization import Optimization, set_changed, settings_of
from grpo.training.schedule import schedule as of_run

SHAPES = {"weight": (3, 4), "bias": (4,)}


def optim(option: str, *more: str):
    return instantiate(compose_config(f"optim={option}", "output_dir=.", *more).optim)


def step(optimizer: Optimizer, weights: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in weights:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def resumed(then, now, weights: list[nn.Parameter], steps: int = 3):
    """Return the optimizer and the schedule of the settings `now` after so many steps of those of `then`, in a run of ten."""
    names = [*SHAPES]
    first = then.optimizer([*zip(names, weights, strict=True)])
    given, schedule = settings_of(first), then.built(first, 10)
    for number in range(steps):
        step(first, weights, number)
        schedule.step()
    second = now.optimizer([*zip(names, weights, strict=True)])
    given_now = settings_of(second)
    now.built(second, 10)
    second.load_state_dict(first.state_dict())
    set_changed(second, given_now, given)
    return second, now.continued(second, 10, steps), first


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_optimizer_keeps_its_moments_and_takes_new_settings(option):
    """A linear rate has 7 of 10 parts left after three steps."""
    linear = "optim.schedule.name=linear"
    more = ["optim.optimizer.lr=0.02", "optim.optimizer.weight_decay=0.5"]
    weights = parameters()
    second, schedule, first = resumed(optim(option, linear), optim(option, linear, *more), weights)
    assert second.param_groups[0]["lr"] == pytest.approx(0.014) and second.param_groups[0]["weight_decay"] == 0.5
    assert all(rate == pytest.approx(0.014) for rate in schedule.get_last_lr()) and schedule.last_epoch == 3
    for p in weights:
        for name, value in first.state.get(p, {}).items():
            assert torch.equal(torch.as_tensor(second.state[p][name]), torch.as_tensor(value)), name
    before = [p.detach().clone() for p in weights]
    step(second, weights, 9)
    if option == "sgd":  # p - lr (g + decay p)
        generator = torch.Generator().manual_seed(9)
        for p, old in zip(weights, before, strict=True):
            torch.testing.assert_close(
                p.detach(), old - 0.014 * (torch.randn(p.shape, generator=generator) + 0.5 * old)
            )


@pytest.mark.parametrize("option", OPTIONS)
def test_the_same_settings_are_no_change(option):
    linear = optim(option, "optim.schedule.name=linear", "optim.optimizer.lr=0.01")
    weights, again = parameters(), parameters()
    second, *_ = resumed(linear, linear, weights)
    straight = linear.optimizer([*zip(SHAPES, again, strict=True)])
    schedule = linear.built(straight, 10)
    for number in range(3):
        step(straight, again, number)
        schedule.step()
    for optimizer, ps in ((second, weights), (straight, again)):
        step(optimizer, ps, 3)
    assert all(torch.equal(p, q) for p, q in zip(weights, again, strict=True))


class Counting(SGD):
    """An optimizer that keeps a count among its settings, as Prodigy does."""

    def __init__(self, parameters, lr: float = 0.1, k: int = 0) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["k"] = k

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        return super().step(closure)


@pytest.mark.parametrize(("now", "k"), [({}, 3), ({"k": 7}, 7)])
def test_a_state_among_the_settings_goes_on_unless_its_beginning_was_changed(now, k):
    def settings(**more):
        return Optimization(partial(Counting, **more), of_run)

    second, *_ = resumed(settings(), settings(lr=0.2, **now), parameters())
    assert (second.param_groups[0]["k"], second.param_groups[0]["lr"]) == (k, 0.2)


def test_settings_that_need_a_state_which_is_not_there_are_refused_in_one_line():
    with pytest.raises(
        UserError, match=r"optim\.optimizer: its settings need max_exp_avg_sq, which the checkpoint lacks"
    ):
        resumed(optim("adamw"), optim("adamw", "+optim.optimizer.amsgrad=true"), parameters())


def test_the_run_is_as_far_as_its_rollouts_if_each_has_more_updates(toy):
    """Two rollouts of one update each are four of two. The entropy's weight and the loss's scale are as they were left."""
    entropy = EntropyBonus(0.01, target=1.0)
    before, after = make_module(fresh(toy), entropy=entropy), make_module(fresh(toy), entropy=entropy, num_epochs=2)
    before.updates, checkpoint = 2, {"state_dict": {}}
    before.scale, after.scale = LossScaling(64).made(), LossScaling(64).made()
    before.scale.value = 32.0
    before.entropy.update(0.5)
    before.on_save_checkpoint(checkpoint)
    after.on_load_checkpoint(checkpoint)
    assert after.updates == 4 and after.position()["rollout"] == 3 and after.entropy.alpha == 0.015
    assert after.scale.value == 32


def test_what_was_ignored_is_watched_if_it_is_no_longer_ignored():
    before, after = Health(ignore=["loss/kl"]), Health()
    before.watch.silent.add("loss/ratio")
    after.load_state_dict(before.state_dict())
    assert after.warned() == ["loss/ratio"] and "loss/kl" not in after.watch.silent


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-7), (torch.bfloat16, None)])
def test_rounding_that_was_measured_in_another_number_type_is_unknown(dtype, rounding):
    callback = object.__new__(RolloutCallback)
    callback.rounding, callback.engine, callback.plan = None, None, Plan(1, 2, 1, SimpleNamespace(temperature=1.0))
    callback.rollouts = SimpleNamespace(task=None)

    def begun(health: Health, dtype: torch.dtype) -> Health:
        policy = nn.Linear(1, 1)
        policy.dtype = dtype
        health.on_train_start(SimpleNamespace(callbacks=[callback], precision="32"), SimpleNamespace(policy=policy))
        return health

    before, after = Health(), Health()
    before.watch.rounding = 1e-7
    after.load_state_dict(begun(before, torch.float32).state_dict())
    assert begun(after, dtype).watch.rounding == rounding


def test_outcomes_go_with_their_rows():
    """Row 2 has moved to the front, and row 0 is gone."""
    from grpo.extras.selection.samplers import Weighted

    rows = [{"n": n} for n in range(4)]
    before = Weighted(rows, 2, 0, None)
    before.latest = {0: (0.0, 0.0), 2: (1.0, 1.0), 3: (0.5, 0.5)}
    after = Weighted([rows[2], rows[3], {"n": 9}], 2, 0, None)
    after.load_state_dict(before.state_dict())
    assert after.latest == {0: (1.0, 1.0), 1: (0.5, 0.5)}


def test_a_state_goes_to_the_class_that_it_is_of(caplog):
    """Another selection begins without one, and a line says so; a part of it that stays goes on."""
    from grpo.extras.selection.selection import Fewer, Replay

    replay = Replay()
    replay.kept = [(0, [])]
    saved = everything({"selection": replay})
    set_everything({"selection": Fewer(1)}, saved)
    assert "the checkpoint has a state of selection Replay: Fewer begins without one" in caplog.text
    again = Replay()
    set_everything({"selection": again}, saved)
    assert again.kept == [(0, [])]
    outer = Fewer(1, inner=Everything())
    outer.load_state_dict(Fewer(1, inner=replay).state_dict())  # its inner selection is another one


def test_the_generators_begin_with_a_new_seed():
    torch.manual_seed(0)
    saved, expected = everything({}), torch.rand(3)
    torch.manual_seed(1)
    anew = torch.rand(3)
    for same, wanted in ((True, expected), (False, anew)):
        torch.manual_seed(1)
        set_everything({}, saved, same)
        assert torch.equal(torch.rand(3), wanted)


def test_a_resumed_run_knows_its_accuracy_what_it_owes_and_its_step():
    """The manifest has the accuracy before the next evaluation; numbers noted at the end have the step of the last rollout."""
    evaluation, recorder = EvaluationCallback(None, None, {}), Recorder()
    evaluation.accuracy, evaluation.owed, recorder.step = 0.5, {"rollout/reward": 1.0}, 3
    resumed, anew = EvaluationCallback(None, None, {}), Recorder()
    resumed.load_state_dict(evaluation.state_dict())
    anew.load_state_dict(recorder.state_dict())
    assert (resumed.accuracy, resumed.owed, anew.step) == (0.5, {"rollout/reward": 1.0}, 3)
    resumed.load_state_dict({"owed": {}})  # as runs before this one wrote it
    assert resumed.accuracy is None
