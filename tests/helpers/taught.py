"""Modules that learn from a teacher, in place of a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo.extras.teachers.kinds import Model, Teacher
from grpo.extras.teachers.module import Lessons
from grpo.extras.teachers.teaching import Imitation, Teaching
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule
from helpers.learning import make_module


class Alone(Lessons):
    """No teacher here asks what made the rollout."""

    rollouts = None


class Given(Model):
    """teacher=model, with a model that is in memory already. visits: how often it was on its device for passes."""

    def __init__(self, model: nn.Module, offload: bool = False) -> None:
        self.loaded, self.offload, self.visits = model.requires_grad_(False), offload, 0

    def attach(self, policy: nn.Module) -> None:
        Teacher.attach(self, policy)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self.visits += 1
        with super().model() as model:
            yield model


def other_model(toy, folder, seed: int = 5) -> str:
    """Save a model like the toy, with other weights, and return its folder."""
    from helpers.models import disturb

    model = Pretrained(str(toy)).model()
    disturb(model, seed, size=0.1)
    model.save_pretrained(folder)
    return str(folder)


def taught(
    policy,
    teacher: Teacher | str,
    imitation: dict | None = None,
    policy_coef: float = 0.0,
    by: str = "token",
    **settings,
) -> GRPOModule:
    """Return a module that learns from a teacher, or from the model in a folder. Settings of the teaching have its names; its
    reduction is `by`."""
    teacher = Model(Pretrained(teacher)) if isinstance(teacher, str) else teacher
    names = Teaching.__dataclass_fields__.keys() - {"reduce"}
    teaching = Teaching(reduce=by, **{"coef": 1.0} | {name: settings.pop(name) for name in names & settings.keys()})
    parts = {"teacher": teaching, "imitation": Imitation(**imitation or {}), "policy_coef": policy_coef}

    return make_module(policy, parts={"teacher": Alone(teacher)}, **{"reduce": "token", **parts, **settings})


def learned(module: GRPOModule, batch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the weights after an update, and the metrics."""
    metrics = module.training_step(batch, 0)
    return {name: p.detach().clone() for name, p in module.policy.named_parameters()}, metrics


def assigned(module: GRPOModule, batch: RolloutBatch) -> TokenBatch:
    """Return the rows of a rollout with their weights in the terms of the loss."""
    return module.parts.assign(batch.tokens, batch)


def same(one: dict[str, Tensor], two: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == two.keys()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, atol=atol, rtol=0, msg=name)
