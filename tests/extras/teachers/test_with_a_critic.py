"""A teacher and a critic are parts of one update: its step is the sum of theirs, whatever else a row has."""

import pytest
import torch
from helpers.learning import ADVANTAGES, actor_critic, fresh, make_module, rollout
from helpers.taught import Alone, other_model
from hydra.utils import instantiate

from grpo.extras.critic.gae import gae
from grpo.extras.critic.module import Values
from grpo.extras.teachers.kinds import Model
from grpo.extras.teachers.module import Lessons
from grpo.extras.teachers.teaching import Imitation, Teaching
from grpo.models.pretrained import Pretrained

UNKNOWN = torch.tensor(
    [[torch.nan, torch.nan], [0.5, -0.5]]
)  # the first group has no reward, and a teacher all the same
CUT = {"layout": "padded", "max_tokens_per_microbatch": 14}


@pytest.fixture(scope="module")
def teacher(toy, tmp_path_factory) -> str:
    return other_model(toy, tmp_path_factory.mktemp("teacher"))


def lessons(teacher: str) -> dict[str, Lessons]:
    return {"teacher": Alone(Model(Pretrained(teacher)))}


def step(module, rewards=ADVANTAGES, number: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    before = {name: p.detach().clone() for name, p in module.trained().items()}
    metrics = module.training_step(rollout(number, rewards=rewards), 0)
    return {name: p.detach() - before[name] for name, p in module.trained().items()}, metrics


@pytest.mark.parametrize(
    ("divergence", "own", "cut", "rewards"),  # each pair of two values once
    [
        ("sampled", False, {}, ADVANTAGES),
        ("sampled", True, CUT, UNKNOWN),
        ("reverse", False, CUT, UNKNOWN),
        ("reverse", True, {}, UNKNOWN),
        ("reverse", True, CUT, ADVANTAGES),
    ],
    ids=["plain", "sampled, all else", "reverse with a head", "reverse with a model", "reverse, cut"],
)
def test_a_step_is_the_sum_of_the_steps_of_its_parts(toy, teacher, divergence, own, cut, rewards):
    taught = {"teacher": Teaching(0.5, divergence), "imitation": Imitation(sampled=0.1)}
    settings = {"advantage": gae, "reduce": "token", **cut}
    both, metrics = step(
        actor_critic(fresh(toy), toy if own else None, parts=lessons(teacher), **taught, **settings), rewards
    )
    valued, of_critic = step(actor_critic(fresh(toy), toy if own else None, **settings), rewards)
    text = {"policy_coef": 0.0, "advantage": lambda rewards: rewards}
    alone, of_teacher = step(make_module(fresh(toy), parts=lessons(teacher), **taught, **settings | text), rewards)
    assert both.keys() == valued.keys() > alone.keys()
    for name, change in both.items():
        expected = valued[name] + alone.get(name, 0.0)
        torch.testing.assert_close(change, expected, atol=1e-6, rtol=0, msg=name)
    assert metrics["teacher/divergence"] == pytest.approx(of_teacher["teacher/divergence"], rel=1e-5)
    for name in ("loss/value", "value/mean", "value/grad_norm", "value/explained_variance"):
        assert metrics[name] == pytest.approx(of_critic[name], rel=1e-4)


def test_nobody_teaches_the_policy_while_the_critic_is_pretrained(toy, teacher):
    taught = {"teacher": Teaching(1.0, "reverse"), "parts": lessons(teacher)}
    module = actor_critic(fresh(toy), pretrain=1, **taught)
    first, metrics = step(module)
    assert {name for name, change in first.items() if change.any()} == {"critic.head.weight", "critic.head.bias"}
    assert metrics["teacher/divergence"] > 0.01
    second, _ = step(module, number=1)
    assert all(change.any() for change in second.values())


def test_configurations_of_earlier_runs_name_the_same_update(toy, teacher):
    """Each had a class of its own, which overrode the update."""
    old = {"_partial_": True, "critic": {"_target_": "grpo.training.critic.ValueLearning", "lr": 0.1}}
    critic = instantiate({"_target_": "grpo.training.critic.ActorCritic", **old}, _convert_="all")
    model = {"_target_": "grpo.models.pretrained.Pretrained", "path": teacher}
    old = {"_partial_": True, "teacher": {"_target_": "grpo.teachers.kinds.Model", "model": model}}
    taught = instantiate({"_target_": "grpo.teachers.module.Taught", **old}, _convert_="all")
    module = make_module(fresh(toy), module=critic, advantage=gae)
    assert isinstance(module.parts["critic"], Values) and module.parts["critic"].learning.lr == 0.1
    checkpoint = {"state_dict": module.state_dict()}
    assert {name for name in checkpoint["state_dict"] if name.startswith("critic.")} == {
        "critic.head.weight",
        "critic.head.bias",
    }
    module = make_module(fresh(toy), module=taught, teacher=Teaching(1.0))
    assert isinstance(module.parts["teacher"], Lessons)
