"""Modules that learn from a few episodes, in place of a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT
from torch import tensor

from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.critic.gae import gae
from grpo.extras.critic.module import ValueLearning, Values
from grpo.models.pretrained import Pretrained
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip
from grpo.rollout.collate import collate, scores
from grpo.rollout.types import Sample
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule
from grpo.training.optimization import Optimization


def episode(prompt: tuple[int, ...], ids: tuple[int, ...], logprobs: tuple[float, ...] | None = None) -> Sample:
    step = Step(State((Message("user", "q"),)), Action(Message("assistant", "a")))
    completion = Completion(ids, logprobs or (-0.5,) * len(ids), "stop")
    return Sample({}, Trajectory((step,)), (Turn(prompt, completion),), Reward(0.0, False))


GROUPS = [
    [episode((11, 12, 13), (21, 22)), episode((11, 12, 13), (23,))],
    [episode((14,), (24, 25, 26, 27)), episode((14,), (28, 29, 30))],
]


ADVANTAGES = tensor([[1.0, -1.0], [0.5, -0.5]])


def as_given(rewards):
    """Return the rewards as advantages."""
    return rewards


def make_module(
    policy,
    max_tokens_per_microbatch=1000,
    optimizer=torch.optim.SGD,
    lr=0.1,
    max_grad_norm=None,
    layout="shared_prompt",
    module=GRPOModule,
    parts=None,
    **algorithm,
) -> GRPOModule:
    settings = {"advantage": as_given, "surrogate": clip, "max_tokens": 4, **algorithm}
    if "kl_coef" in settings:
        settings["kl"] = KL(coef=settings.pop("kl_coef"))
    module = module(
        policy,
        Algorithm(**settings),
        Optimization(
            lambda parameters: optimizer(parameters, lr=lr),
            lambda optimizer, num_training_steps: torch.optim.lr_scheduler.LinearLR(
                optimizer, 1.0, 0.0, num_training_steps
            ),
            max_tokens_per_microbatch,
            max_grad_norm,
            layout,
        ),
        temperature=1.0,
        num_rollouts=4,
        seed=0,
        **({"parts": parts} if parts else {}),
    )
    optimizers, schedules = module.configure_optimizers()
    # in place of the Trainer, which only returns these
    module.optimizers, module.lr_schedulers = lambda: optimizers[0], lambda: schedules[0]
    module.manual_backward = lambda loss: loss.backward()
    return module


def rollout(number=0, rewards=ADVANTAGES, groups=GROUPS, tokens=None, **change) -> RolloutBatch:
    """Return the module's batch for a rollout with these groups and rewards."""
    return RolloutBatch(
        number, tokens=tokens or collate(groups), scores=replace(scores(groups), rewards=rewards, **change)
    )


def trained(policy, batch=None, **settings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    module = make_module(policy, **settings)
    metrics = module.training_step(batch or rollout(), 0)
    return {name: p.detach().clone() for name, p in policy.named_parameters()}, metrics


def fresh(toy):
    return Pretrained(str(toy)).model()


def actor_critic(policy, toy=None, coef=0.1, lam=1.0, pretrain=0, critic_lr=0.1, parts=None, **settings) -> GRPOModule:
    """Return a module with a critic whose head already tells states apart. toy: the folder of its own model."""
    learning = ValueLearning(toy and Pretrained(str(toy)), lr=critic_lr, coef=coef, lam=lam, pretrain=pretrain)

    class Told(Values):
        def attach(self, module: GRPOModule) -> None:
            super().attach(module)
            head, generator = self.critic.head, torch.Generator().manual_seed(0)
            head.weight.data.copy_(torch.randn(head.weight.shape, generator=generator))
            head.bias.data.fill_(0.05)

    parts = {**(parts or {}), "critic": Told(learning)}
    return make_module(policy, parts=parts, **{"advantage": gae, "reduce": "token", **settings})


@contextmanager
def captured_hidden_states(model) -> Iterator[list[torch.Tensor]]:
    """Collect the inputs of a language model's head, [..., H] each, in a `with` block."""
    states: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.append(args[0]))
    try:
        yield states
    finally:
        hook.remove()


def batch_of(policy: list[list[float]], reference: list[list[float]], lengths: list[int]) -> TokenBatch:
    width = len(policy[0])
    return TokenBatch(
        ids=torch.zeros(len(policy), width + 1, dtype=torch.int64),
        attention_mask=torch.ones(len(policy), width + 1, dtype=torch.int64),
        mask=torch.arange(width) < tensor(lengths)[:, None],
        rollout_logprobs=tensor(policy),
        sample=torch.arange(len(policy)),
        old_logprobs=tensor(policy),
        reference_logprobs=tensor(reference),
    )


IS_8BIT_HERE = find_spec("bitsandbytes") is not None


NEEDED = {"adamw_8bit": pytest.mark.skipif(not IS_8BIT_HERE, reason="pip install -e '.[8bit]'")}


OPTIONS = [
    pytest.param(file.stem, marks=NEEDED.get(file.stem, ()))
    for file in (ROOT / "conf" / "optim").glob("*.yaml")
    if file.stem != "base"
]
