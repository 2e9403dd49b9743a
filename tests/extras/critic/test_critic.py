"""The update with a critic: what its values are, what it learns, and that both ignore how the rows are cut."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import preset
from helpers.learning import ADVANTAGES, GROUPS, actor_critic, captured_hidden_states, episode, fresh, rollout
from lightning.pytorch.plugins import Precision
from peft import LoraConfig
from torch import tensor

from grpo.extras.critic.gae import gae, value_loss
from grpo.models import packing
from grpo.models.logprobs import completion_logprobs
from grpo.models.policy import with_adapter
from grpo.objectives.entropy import EntropyBonus
from grpo.rollout.collate import collate
from grpo.system import distributed
from grpo.system.errors import UserError

LAYOUTS = ["padded", "packed", "shared_prompt"]


def learned(module, batch=None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    metrics = module.training_step(batch or rollout(), 0)
    return {name: p.detach().clone() for name, p in module.trained().items()}, metrics


def same(one, two, atol=1e-6):
    assert one.keys() == two.keys()
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(("own", "layout"), [*((False, layout) for layout in LAYOUTS), (True, LAYOUTS[-1])])
def test_a_value_is_of_the_state_before_its_token(toy, toy_model, layout, own):
    """V = w h + b of the last hidden state of an unpadded pass, at the token before."""
    module = actor_critic(fresh(toy), toy if own else None, layout=layout, max_tokens_per_microbatch=11)
    module.training_step(batch := rollout(), 0)
    start = actor_critic(fresh(toy), toy if own else None).critic.head
    for row, turn in enumerate(each.turns[0] for group in GROUPS for each in group):
        ids = tensor([turn.prompt_ids + turn.completion.ids])
        states = toy_model.get_decoder()(ids).last_hidden_state[0, len(turn.prompt_ids) - 1 : -1]
        torch.testing.assert_close(batch.tokens.values[row, : len(states)], start(states), atol=1e-5, rtol=0)
        assert not batch.tokens.values[row, len(states) :].any()


@pytest.mark.parametrize("own", [False, True])
def test_the_first_update_follows_the_gradient_worked_by_autograd(toy, own):
    """-mean_t A_t log pi + mean_t (V_t - R)^2 / 2 over all 10 tokens; a tenth of the second gradient goes below the head."""
    module = actor_critic(policy := fresh(toy), toy if own else None)
    tokens, rewards = collate(GROUPS), ADVANTAGES.flatten()[:, None]
    with captured_hidden_states(policy if not own else (twin := fresh(toy))) as states:
        logprobs, _ = completion_logprobs(policy, tokens, 1.0)
        if own:
            completion_logprobs(twin, tokens, 1.0)
    head = module.critic.head
    values = head(states[0][:, :-1][tokens.mask])
    placed = torch.zeros(4, 4).masked_scatter(tokens.mask, values.detach())
    given = ADVANTAGES, torch.full((2, 2, 1), torch.nan), placed, tokens.mask, tokens.sample, tokens.turn
    actor = -(logprobs * gae(*given)).sum() / 10
    critic = value_loss(values, values.detach(), rewards.expand(4, 4)[tokens.mask]).sum() / 10
    names = dict(policy.named_parameters())
    below = dict((twin if own else policy).named_parameters())
    gradients = dict(zip(names, torch.autograd.grad(actor, [*names.values()], retain_graph=True), strict=True))
    wanted = {name: p for name, p in below.items() if p is not below.get("lm_head.weight")}
    of_values = torch.autograd.grad(critic, [*wanted.values(), head.weight, head.bias], allow_unused=True)
    of_values = dict(zip([*wanted, "head.weight", "head.bias"], of_values, strict=True))
    expected = {}
    for name, p in names.items():
        shared = 0 if own or of_values.get(name) is None else 0.1 * of_values[name]
        expected[name] = p.detach() - 0.1 * (gradients[name] + shared)
    for name, gradient in of_values.items():
        if name.startswith("head."):
            expected[f"critic.{name}"] = module.trained()[f"critic.{name}"].detach() - 0.1 * gradient
        elif own and gradient is not None:
            name = name.removeprefix("model.")
            expected[f"critic.model.{name}"] = module.trained()[f"critic.model.{name}"].detach() - 0.1 * gradient
    found, metrics = learned(module)
    same(expected, found)
    critic, values = critic.detach(), values.detach()
    assert metrics["loss/value"] == pytest.approx(float(critic), rel=1e-5)
    norm = torch.stack([g.norm() for n, g in of_values.items() if g is not None and (own or "head." in n)]).norm()
    assert metrics["value/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["value/mean"] == pytest.approx(float(values.mean()), abs=1e-6)
    returns = rewards.expand(4, 4)[tokens.mask]
    explained = 1 - float((returns - values).var() / returns.var())
    assert metrics["value/explained_variance"] == pytest.approx(explained, abs=1e-5)


CUTS = {
    "one": {},
    "single rows": {"max_tokens_per_microbatch": 1},
    "padded": {"layout": "padded"},
    "padded, cut": {"layout": "padded", "max_tokens_per_microbatch": 14},
    "packed": {"layout": "packed"},
}


@pytest.mark.parametrize(
    ("own", "several"),
    [
        pytest.param(True, {}, id="one"),
        pytest.param(
            False, {"num_minibatches": 2, "num_epochs": 2, "lam": 0.9, "lr": 0.01, "critic_lr": 0.001}, id="several"
        ),
    ],
)
def test_rows_may_be_cut_padded_and_ordered_in_any_way(toy, own, several):
    found = {
        name: learned(actor_critic(fresh(toy), toy if own else None, **several, **cut)) for name, cut in CUTS.items()
    }
    weights, metrics = found["one"]
    assert metrics["loss/grad_norm"] > 0.01 and metrics["value/grad_norm"] > 0.01
    for other, others in found.values():
        same(weights, other)
        for name in ("loss/value", "loss/policy", "value/grad_norm", "value/explained_variance"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5)
    if not several:
        turned = rollout(groups=GROUPS[::-1], rewards=ADVANTAGES.flip(0))
        same(weights, learned(actor_critic(fresh(toy), toy if own else None), turned)[0])
        wide = [[replace(one, turns=one.turns) for one in group] for group in GROUPS]
        more = [*wide, [episode((15,) * 9, (30,) * 9)] * 2]  # without a reward, so that its rows only pad
        rewards = torch.cat([ADVANTAGES, torch.full((1, 2), torch.nan)])
        same(weights, learned(actor_critic(fresh(toy), toy if own else None), rollout(groups=more, rewards=rewards))[0])


@pytest.mark.parametrize("own", [False, True])
def test_pretraining_moves_the_critic_alone(toy, own):
    """In the first rollout, on sums of rewards whatever lam is; in the second both learn. The optimizer has seen no gradient."""
    adamw = partial(torch.optim.AdamW, weight_decay=0.1)
    settings = {
        "coef": 1.0,
        "lam": 0.0,
        "pretrain": 1,
        "optimizer": adamw,
        "critic_lr": 1e-2,
        "entropy": EntropyBonus(1e-3),
    }
    module = actor_critic(policy := fresh(toy), toy if own else None, **settings)
    before = {name: p.detach().clone() for name, p in module.trained().items()}
    first, metrics = learned(module, batch := rollout())
    moved = {name for name, p in first.items() if not torch.equal(p, before[name])}
    assert moved and all(name.startswith("critic.") for name in moved)
    assert {"critic.head.weight", "critic.head.bias"} <= moved
    assert (len(moved) > 2) == own and not any(p in module.optimizers().state for p in policy.parameters())
    torch.testing.assert_close(batch.tokens.targets, ADVANTAGES.flatten()[:, None] * batch.tokens.mask)
    assert (metrics["loss/grad_norm"], metrics["loss/skipped"]) == (0.0, 0.0)
    assert module.entropy.entropy == torch.inf  # the controller has seen no update
    second, metrics = learned(module, batch := rollout(1))
    assert all(not torch.equal(p, first[name]) for name, p in second.items()) and 0 < module.entropy.entropy < 20
    following = batch.tokens.values[2, :4].roll(-1)
    following[-1] = 0.5  # lam 0: the next value, and at the end the reward
    torch.testing.assert_close(batch.tokens.targets[2, :4], following)


def test_the_value_loss_is_a_mean_over_the_tokens_of_all_ranks(toy, monkeypatch):
    """Two ranks of 10 tokens each: the mean of their gradients is that of the sum over 20 tokens, divided by 20."""
    module = actor_critic(fresh(toy))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_sum", lambda count: 2 * count)
    tokens = collate(GROUPS)
    found = module.parts["critic"].weigh(replace(tokens, values=torch.zeros(4, 4)), 4.0).valuing
    torch.testing.assert_close(found, 2 / 20 * tokens.mask)


def test_a_critic_on_low_precision_and_an_adapter(toy):
    """bfloat16 parameters have float32 masters, the head's too; with LoRA the head learns and the base stays."""
    module = actor_critic(fresh(toy).bfloat16(), optimizer=torch.optim.SGD, lr=1e-6, critic_lr=1e-6)
    assert module.critic.head.weight.dtype == torch.bfloat16
    start = module.critic.head.weight.detach().float()
    state = module.optimizers().state_dict
    before = state()["masters"][-2].clone()
    learned(module)
    master = state()["masters"][-2]
    assert master.dtype == torch.float32 and not torch.equal(master, before)  # a step that bfloat16 would lose
    assert torch.equal(module.critic.head.weight.detach().float(), start)
    torch.manual_seed(0)
    policy = with_adapter(fresh(toy), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    module = actor_critic(policy, coef=1.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    learned(module)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert {"critic.head.weight", "critic.head.bias"} <= changed
    assert all("lora_" in name for name in changed - {"critic.head.weight", "critic.head.bias"}) and len(changed) > 2


def test_a_critic_s_model_reads_the_policy_s_tokens(toy, tmp_path):
    from helpers.models import model_folder

    small = model_folder("llama", tmp_path)
    policy = fresh(toy)
    policy.resize_token_embeddings(policy.config.vocab_size + 7)
    with pytest.raises(UserError, match=r"critic\.model\.path=.* has \d+ tokens, the policy \d+: take a model with"):
        actor_critic(policy, small)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ("algo=ppo critic=none", "algo.advantage (gae) needs the values of a critic: set critic=head or critic=model"),
        (
            "critic=head",
            "algo.advantage (group_advantages) does not use the values of the critic: set critic=none, or ",
        ),
        (
            "algo=ppo algo/kl=reward",
            "algo.kl.place=reward changes the rewards, but the critic's targets are the rewards ",
        ),
    ],
)
def test_a_critic_and_what_uses_it_are_chosen_together(chosen, line):
    with pytest.raises(UserError) as refusal:
        preset(*chosen.split())
    assert line in str(refusal.value)


def test_the_layout_of_the_critics_own_model_is_tried_before_the_first_rollout(toy, monkeypatch):
    from grpo.extras.kernels.callback import KernelsCallback

    monkeypatch.setattr(packing, "ON_GPU", [])  # the callback puts its kernel there
    module, callback = actor_critic(fresh(toy), toy), KernelsCallback("none")
    callback.on_train_start(SimpleNamespace(precision_plugin=Precision()), module)
    assert "layout" in vars(module.parts["critic"])
    assert callback.facts()["kernels"]["critic"] == "shared_prompt, sdpa"
