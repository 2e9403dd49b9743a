"""Around the objective: from scores to token advantages, skipped rows, and state that moves from update to update."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import preset
from helpers.learning import GROUPS, batch_of, episode, fresh, make_module, rollout, trained
from peft import LoraConfig
from torch import tensor

from grpo.apps.try_algorithm import check_algorithm
from grpo.env.types import Reward
from grpo.models.logprobs import completion_logprobs
from grpo.models.policy import with_adapter
from grpo.objectives.advantage import group_advantages, no_baseline
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip, reinforce
from grpo.rollout.collate import collate, scores
from grpo.rollout.draw import Everything
from grpo.rollout.types import Sample
from grpo.system.errors import UserError
from grpo.system.progress import Progress

close = torch.testing.assert_close
NAN = math.nan


# -- credit: two samples of one prompt, of two tokens and one

TWO = [episode((1,), (2, 3)), episode((1,), (4,))]
TOKENS = batch_of([[-1.0, -2.0], [-1.0, 0.0]], [[-1.5, -2.1], [-0.8, 0.0]], [2, 1])  # k1: 0.5 and 0.1; -0.2


def scored(rewards, **change):
    return replace(scores([TWO]), rewards=tensor([rewards]), **change)


def test_kl_in_the_reward_leaves_before_the_baseline():
    algorithm = Algorithm(lambda rewards: rewards - rewards.mean(), clip, 4, kl=KL(0.1, "k1", "reward"))
    got = algorithm.credit(scored([1.0, 0.0]), TOKENS).advantages
    # 1 - 0.1 x 0.6 = 0.94 and 0 + 0.1 x 0.2 = 0.02: mean 0.48
    close(got, tensor([[0.46, 0.46], [-0.46, 0.0]]))


def test_reinforce_pp_gives_every_token_its_own():
    algorithm = preset("algo=reinforce_pp", "algo.kl.coef=0.1", "algo.whiten=false")
    got = algorithm.credit(scored([1.0, 0.0]), TOKENS).advantages
    close(got, tensor([[0.94, 0.99], [0.02, 0.0]]))  # 1 - 0.1 x (0.5 + 0.1), 1 - 0.1 x 0.1, 0 + 0.1 x 0.2
    whitened = preset("algo=reinforce_pp", "algo.kl.coef=0.1").credit(scored([1.0, 0.0]), TOKENS).advantages
    # mean 0.65, variance ((0.29)^2 + (0.34)^2 + (0.63)^2) / 3
    close(whitened, tensor([[0.29, 0.34], [-0.63, 0.0]]) / math.sqrt((0.29**2 + 0.34**2 + 0.63**2) / 3))


def test_whitening_counts_tokens_not_samples():
    got = preset("algo=reinforce_pp_baseline").credit(scored([1.0, 0.0]), TOKENS).advantages
    # 0.5 twice, -0.5 once: mean 1/6, variance 2/9
    close(got, tensor([[1 / 3, 1 / 3], [-2 / 3, 0.0]]) / math.sqrt(2 / 9), atol=1e-6, rtol=0)


def test_a_truncated_answer_stays_in_the_baseline_and_out_of_the_loss():
    algorithm = Algorithm(lambda rewards: rewards - rewards.mean(), clip, 4, mask_truncated=True)
    got = algorithm.credit(scored([1.0, 0.0], truncated=tensor([[True, False]])), TOKENS)
    close(got.advantages, tensor([[0.0, 0.0], [-0.5, 0.0]]))
    assert got.mask.tolist() == [[False, False], [True, False]]
    close(algorithm.weights(got.mask), tensor([[0.0, 0], [1.0, 0]]))  # it counts in no mean
    constant = replace(algorithm, reduce="constant")
    close(constant.weights(got.mask), tensor([[0.0, 0], [1 / 8, 0]]))  # but 1 / (B L_max) stays 1 / (2 x 4)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_dr_grpo_does_not_learn_faster_from_what_is_left_of_truncated_answers(toy, num_minibatches):
    """Half of the rows is masked. The others have the weight that they have without a mask."""
    batch = rollout(rewards=tensor([[1.0, 0.0], [0.0, -0.5]]))
    cut = rollout(rewards=tensor([[1.0, 9.0], [9.0, -0.5]]))
    cut.scores = replace(cut.scores, truncated=tensor([[False, True], [True, False]]))
    settings = {"reduce": "constant", "num_minibatches": num_minibatches}
    expected, _ = trained(fresh(toy), batch, **settings)
    got, _ = trained(fresh(toy), cut, mask_truncated=True, **settings)
    for name in expected:
        close(got[name], expected[name], atol=1e-7, rtol=0)


def test_an_advantage_that_the_environment_gives_takes_the_place_of_the_estimators():
    algorithm = Algorithm(lambda rewards: rewards - rewards.mean(), clip, 4)
    given = replace(TOKENS, given=tensor([[NAN, NAN], [2.0, 3.0]]))
    got = algorithm.credit(scored([1.0, 0.0]), given)
    close(got.advantages, tensor([[0.5, 0.5], [2.0, 0.0]]))
    unknown = Algorithm(group_advantages, clip, 4).credit(scored([1.0, NAN]), given)
    assert unknown.mask.tolist() == [[True, True], [False, False]] and not unknown.advantages.any()


def test_no_reward_nothing_to_learn():
    got = Algorithm(group_advantages, clip, 4).credit(scored([1.0, NAN]), TOKENS)
    assert got.mask.tolist() == [[True, True], [False, False]] and not got.advantages.any()


@pytest.mark.parametrize(
    ("advantage", "second"),
    [(lambda rewards: rewards.nan_to_num(0.0), NAN), (lambda rewards: tensor([[1.0, NAN]]), 0.0)],
)
def test_an_unknown_reward_and_an_unknown_advantage_leave_the_mask(advantage, second):
    got = Algorithm(advantage, clip, 4).credit(scored([1.0, second]), TOKENS)
    assert got.mask.tolist() == [[True, True], [False, False]]


def test_whitening_is_over_truncated_answers_too():
    algorithm = Algorithm(no_baseline, clip, 4, whiten=True, mask_truncated=True)
    got = algorithm.credit(scored([1.0, 4.0], truncated=tensor([[False, True]])), TOKENS)
    close(got.advantages, tensor([[-1.0, -1.0], [0.0, 0.0]]) / math.sqrt(2))  # 1 1 4: mean 2, variance 2


def test_the_mean_over_a_sample_is_over_its_tokens_in_all_of_its_rows():
    values = tensor([[1.0, 3.0], [5.0, 99.0]])
    close(TOKENS.sample_means(values, (1, 2)), tensor([[2.0, 5.0]]))
    close(replace(TOKENS, sample=tensor([1, 1])).sample_means(values, (1, 2)), tensor([[0.0, 3.0]]))


def test_the_kl_of_a_sample_is_that_of_its_tokens_in_all_of_its_rows():
    """0.5 in each of two rows, whatever stands behind them."""
    tokens = replace(batch_of([[-1.0, 9.0], [-2.0, 9.0]], [[-1.5, 0.0], [-2.5, 0.0]], [1, 1]), sample=tensor([0, 0]))
    got = Algorithm(no_baseline, clip, 4, kl=KL(0.1, "k1", "reward")).credit(scored([1.0, 0.0]), tokens)
    close(got.advantages, tensor([[0.9, 0.0], [0.9, 0.0]]))


def test_each_part_of_the_loss_compares_its_own_two_policies():
    """One token with log-probability -1 under the old policy, -1.5 in the engine, -3 under the reference, and -2 now."""
    batch = replace(batch_of([[-1.0]], [[-3.0]], [1]), rollout_logprobs=tensor([[-1.5]]), weights=torch.ones(1, 1))
    batch, now = replace(batch, advantages=tensor([[-1.0]])), tensor([[-2.0]], requires_grad=True)

    def loss(batch=batch, **settings):
        found, logged = Algorithm(no_baseline, partial(clip, low=None), 4, **settings).loss(
            now, torch.zeros(1, 1), batch
        )
        return found.item(), torch.autograd.grad(found, now)[0].item(), logged

    l = math.exp(-1)  # noqa: E741 - rho, since A = -1
    *found, logged = loss()
    assert found == pytest.approx([l, l]) and logged["approx_kl"].item() == pytest.approx(l - 1 + 1)
    assert loss(correction=lambda log_w: log_w.exp())[0] == pytest.approx(l * math.exp(0.5))
    assert [loss(off_policy_delta=delta)[0] for delta in (0.6, 0.4)] == pytest.approx([l, 0.0])
    assert loss(kl=KL(0.1, "k1"))[:2] == pytest.approx((l + 0.1, l + 0.1))
    assert loss(kl=KL(0.1, "k1", target="rollout"))[:2] == pytest.approx((l - 0.05, l + 0.1))
    assert loss(kl=KL(0.1, "k1", "loss_with_ratio"))[:2] == pytest.approx((l + 0.1 * l, l + 0.2 * l))
    assert loss(kl=KL(0.1, "k1", "reward"))[0] == pytest.approx(l)
    left_out = replace(batch, counted=tensor([[False]]))
    assert loss(left_out, kl=KL(0.1, "k1"))[0] == pytest.approx(0.1)


def test_a_part_called_overlong_is_not_hidden_by_the_penalty():
    algorithm = Algorithm(no_baseline, clip, max_tokens=10, overlong_share=0.5)
    with pytest.raises(UserError, match="a part of the reward is called 'overlong'"):
        algorithm.shaped(replace(scored([1.0, 0.0]), parts={"overlong": torch.ones(1, 2)}))


def test_overlong_answers_lose_reward():
    algorithm = Algorithm(no_baseline, clip, max_tokens=10, overlong_share=0.5)
    long = scored([1.0, 0.0], last_lengths=tensor([[9.0, 5.0]]))
    got = algorithm.shaped(long)
    close(got.rewards, tensor([[0.2, 0.0]]))  # (9 - 5) / 5 of the way
    close(got.parts["overlong"], tensor([[-0.8, 0.0]]))
    assert Algorithm(no_baseline, clip, 10).shaped(long) is long


def test_dynamic_sampling_looks_for_right_and_wrong_answers_not_at_the_penalty_of_length():
    """The first group is all wrong with one long answer, the second is mixed."""
    from grpo.extras.selection.selection import Dynamic

    dapo = preset("algo=dapo", "max_tokens=10")
    long = torch.full((2, 2), 4.0).index_put((tensor([0]), tensor([0])), tensor(10.0))
    right = tensor([[0.0, 0.0], [0.0, 1.0]])
    got = dapo.shaped(replace(scores([TWO, TWO]), rewards=right, parts={"correct": right}, last_lengths=long))
    close(got.rewards, tensor([[-1.0, 0.0], [0.0, 1.0]]))
    assert got.has_signal("reward").tolist() == [True, True]
    draw = SimpleNamespace(scores=lambda groups: got)
    assert Dynamic(by="correct").live(draw, []).tolist() == [False, True]
    assert Dynamic(by="reward").live(draw, []).tolist() == [True, True]


@pytest.mark.parametrize(("rounds", "found"), [(1, "WARN"), (2, "FAIL")])
def test_preflight_knows_what_dynamic_sampling_looks_at(rounds, found):
    """Rewards differ, and no answer is right."""
    from grpo.extras.preflight.data import signal
    from grpo.extras.selection.selection import Dynamic

    group = [replace(sample, reward=Reward(value, False)) for sample, value in zip(TWO, (0.0, 0.5), strict=True)]
    plan = SimpleNamespace(plan=SimpleNamespace(group_size=2), selection=Dynamic() if rounds == 2 else Everything())
    plan.task, module = (
        None,
        SimpleNamespace(policy=None, algorithm=SimpleNamespace(advantage=group_advantages, policy_coef=1.0)),
    )
    probe = SimpleNamespace(
        module=module,
        rollouts=plan,
        groups=[group],
        further=lambda: (),
        scores=scores([group]),
        samples=group,
        beyond_rewards=False,
    )
    got = signal(probe)
    assert got.result == found and ("set selection.by=reward" in str(got)) == (rounds == 2)


# -- the update


def test_a_kl_in_the_reward_is_that_of_the_policy_before_the_update(toy):
    module, tokens = make_module(fresh(toy), kl=KL(0.5, "k1", "reward"), lr=1.0), collate(GROUPS)
    module.training_step(rollout(), 0)
    moved = completion_logprobs(module.policy, tokens, 1.0)[0] - completion_logprobs(fresh(toy), tokens, 1.0)[0]
    batch = rollout(1, rewards=torch.zeros(2, 2))
    module.training_step(batch, 0)
    close(tensor(batch.advantages), -0.5 * moved.sum(1).detach().view(2, 2), atol=1e-5, rtol=0)
    assert moved.abs().max() > 0.01


def test_rows_without_advantage_are_skipped_and_nothing_changes(toy):
    """Forward passes only for rows with an advantage, and the same weights as with passes for all rows."""
    rewards = tensor([[1.0, 0.0], [0.0, 0.0]])  # the second group teaches nothing
    seen = []
    module = make_module(fresh(toy), num_epochs=2, lr=0.1)
    inner = module.to_learn
    module.to_learn = lambda minibatch: [
        (seen.append(len(piece)), (rows, piece))[1] for rows, piece in inner(minibatch)
    ]
    module.training_step(rollout(rewards=rewards), 0)
    assert seen == [1, 1]  # one of four rows has an advantage, since there is no baseline

    everything = make_module(fresh(toy), num_epochs=2, lr=0.1)
    everything.live = lambda tokens: torch.arange(len(tokens))
    everything.training_step(rollout(rewards=rewards), 0)
    for (name, p), q in zip(module.policy.named_parameters(), everything.policy.parameters(), strict=True):
        close(p, q, atol=1e-6, rtol=0, msg=name)


def test_a_rollout_without_any_signal_still_makes_its_updates(toy):
    """The optimizer's averages fade and the schedule moves on as if the zero gradient had been computed."""
    module = make_module(fresh(toy), optimizer=torch.optim.AdamW)
    module.training_step(rollout(), 0)
    before = module.policy.model.norm.weight.detach().clone()
    metrics = module.training_step(rollout(1, rewards=torch.zeros(2, 2)), 0)
    assert metrics["loss/grad_norm"] == 0.0 and module.updates == 2
    assert not torch.equal(module.policy.model.norm.weight, before)  # by momentum


def test_nothing_is_skipped_where_the_loss_has_other_terms(toy):
    rewards = tensor([[1.0, 0.0], [0.0, 0.0]])
    for settings in ({"kl": KL(0.1, target="rollout")}, {"entropy": EntropyBonus(0.1)}):
        module = make_module(fresh(toy), **settings)
        tokens = module.algorithm.credit(rollout(rewards=rewards).scores, collate(GROUPS))
        assert len(module.live(tokens)) == 4
    assert len(make_module(fresh(toy)).live(tokens)) == 1


def test_an_entropy_bonus_has_the_gradient_of_the_entropy(toy):
    policy = fresh(toy)
    tokens = collate(GROUPS)
    _, entropy = completion_logprobs(policy, tokens, 1.0, entropy_gradient=True)
    mean = entropy.sum() / tokens.mask.sum()
    gradients = torch.autograd.grad(-0.3 * mean, list(policy.parameters()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(policy.named_parameters(), gradients, strict=True)}
    nothing = rollout(rewards=torch.zeros(2, 2))
    got, metrics = trained(fresh(toy), nothing, reduce="token", entropy=EntropyBonus(0.3))
    for name in expected:
        close(got[name], expected[name], atol=1e-6, rtol=0)
    assert metrics["loss/entropy"] == pytest.approx(mean.item(), abs=1e-4) and metrics["loss/entropy_coef"] == 0.3


def test_the_entropy_bonus_is_steered_from_update_to_update(toy):
    module = make_module(fresh(toy), lr=1e-6, entropy=EntropyBonus(0.1, target=100.0, step=0.02))  # always below
    applied = [module.training_step(rollout(i), 0)["loss/entropy_coef"] for i in range(3)]
    assert applied == pytest.approx([0.0, 0.12, 0.14])  # nothing before the first entropy is known
    module = make_module(fresh(toy), lr=1e-6, entropy=EntropyBonus(0.1, target=0.0, step=0.02))  # always above
    assert [module.training_step(rollout(i), 0)["loss/entropy_coef"] for i in range(3)] == [0.0, 0.0, 0.0]
    assert module.entropy.coef == pytest.approx(0.04)


def test_the_surrogate_can_count_the_tokens_of_highest_entropy_only(toy):
    policy, tokens = fresh(toy), collate(GROUPS)
    logprobs, entropy = completion_logprobs(policy, tokens, 1.0)
    chosen = tokens.mask & (entropy >= entropy[tokens.mask].sort().values[-3])  # 3 of 10
    rewards = tensor([1.0, -1.0, 0.5, -0.5])
    gradients = torch.autograd.grad(-(rewards[:, None] * logprobs * chosen).sum() / 10, list(policy.parameters()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(policy.named_parameters(), gradients, strict=True)}
    got, _ = trained(fresh(toy), rollout(), reduce="token", top_entropy=0.25)  # the quantile falls between two tokens
    for name in expected:
        close(got[name], expected[name], atol=1e-6, rtol=0)


def test_with_the_rollout_as_old_policy_the_engine_is_part_of_the_ratio(toy):
    policy, tokens = fresh(toy), collate(GROUPS)
    logprobs, _ = completion_logprobs(policy, tokens, 1.0)
    tokens = replace(tokens, rollout_logprobs=(logprobs.detach() - 0.1) * tokens.mask)
    module = make_module(fresh(toy), old_policy="rollout", num_epochs=2, lr=1e-6)
    metrics = module.training_step(rollout(tokens=tokens), 0)
    assert metrics["loss/ratio"] == pytest.approx(math.exp(0.1), abs=1e-4)
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.1, abs=1e-5)
    assert not module.algorithm.needs_old


def test_a_correction_weighs_the_term(toy):
    policy, tokens = fresh(toy), collate(GROUPS)
    logprobs, _ = completion_logprobs(policy, tokens, 1.0)
    tokens = replace(tokens, rollout_logprobs=(logprobs.detach() - math.log(1.5)) * tokens.mask)  # w = 1.5 everywhere
    before = dict(fresh(toy).named_parameters())
    plain, _ = trained(fresh(toy), rollout(tokens=tokens))
    weighed, metrics = trained(fresh(toy), rollout(tokens=tokens), correction=lambda log_w, mask: log_w.exp())
    for name, p in before.items():
        close(weighed[name] - p, 1.5 * (plain[name] - p), atol=1e-6, rtol=1e-4)
    assert metrics["loss/correction"] == pytest.approx(1.5, abs=1e-4)


def test_reinforce_needs_no_ratio(toy):
    got, metrics = trained(fresh(toy), level="none", surrogate=reinforce)
    expected, _ = trained(fresh(toy))  # at ratio 1 the two have one gradient
    for name in expected:
        close(got[name], expected[name], atol=1e-6, rtol=0)
    assert "loss/ratio" not in metrics


# -- a reference that moves


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_moves_every_so_many_updates(toy, adapter):
    torch.manual_seed(0)
    policy = fresh(toy)
    if adapter:
        policy = with_adapter(policy, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    module = make_module(policy, lr=1.0, kl=KL(0.01, sync_every=2, sync_alpha=0.25))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    tokens = collate(GROUPS)
    base, _ = completion_logprobs(fresh(toy), tokens, 1.0)

    def reference():
        return module.freeze(tokens).reference_logprobs

    close(reference(), base.detach(), atol=1e-5, rtol=0)
    module.training_step(rollout(0), 0)
    close(reference(), base.detach(), atol=1e-5, rtol=0)  # one update is not two
    module.training_step(rollout(1), 0)
    after = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    assert module.reference.weights.keys() == after.keys()
    for name, p in after.items():
        close(module.reference.weights[name], 0.25 * p + 0.75 * before[name])
    assert (reference() - base).abs().max() > 1e-4
    now, _ = completion_logprobs(policy, tokens, 1.0)  # reading the reference does not change the policy
    module.freeze(tokens)
    assert torch.equal(completion_logprobs(policy, tokens, 1.0)[0], now)


def test_alpha_one_makes_the_reference_the_policy(toy):
    torch.manual_seed(0)
    policy = with_adapter(fresh(toy), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    module = make_module(policy, lr=1.0, kl=KL(0.01, sync_every=1, sync_alpha=1.0))
    module.training_step(rollout(), 0)
    tokens = collate(GROUPS)
    now, _ = completion_logprobs(policy, tokens, 1.0)
    close(module.freeze(tokens).reference_logprobs, now.detach(), atol=1e-6, rtol=0)


# -- corners


@pytest.mark.parametrize("settings", [{"num_epochs": 2}, {"num_minibatches": 2}, {"kl": KL(0.1)}])
def test_a_rollout_without_signal_is_learned_from_in_every_arrangement(toy, settings):
    before = fresh(toy)
    module = make_module(fresh(toy), **settings)
    metrics = module.training_step(rollout(rewards=torch.zeros(2, 2)), 0)
    assert metrics["loss/grad_norm"] < 1e-6 and module.updates == module.algorithm.updates_per_rollout
    for p, q in zip(module.policy.parameters(), before.parameters(), strict=True):
        close(p, q, atol=1e-6, rtol=0)


def test_equal_rewards_whiten_to_nothing():
    algorithm = preset("algo=reinforce_pp", "algo/kl=none")
    tokens = replace(TOKENS, old_logprobs=None, reference_logprobs=None)
    got = algorithm.credit(scored([0.7, 0.7]), tokens).advantages
    assert torch.equal(got, torch.zeros(2, 2))


def test_a_surrogate_with_a_term_of_its_own_is_never_skipped(toy):
    def regularised(ratio, advantages):
        return -ratio * advantages + 0.5 * (ratio - 1.3).square()

    module = make_module(fresh(toy), surrogate=regularised)
    tokens = module.algorithm.credit(rollout(rewards=torch.zeros(2, 2)).scores, collate(GROUPS))
    assert len(module.live(tokens)) == 4
    assert module.training_step(rollout(rewards=torch.zeros(2, 2)), 0)["loss/grad_norm"] > 0.01


def test_gdpo_does_not_learn_from_a_reward_that_nobody_could_give():
    from grpo.extras.losses.baselines import gdpo

    timeout = [replace(TWO[0], reward=replace(TWO[0].reward, value=NAN)), TWO[1]]
    assert scores([timeout]).parts["correct"].isnan().tolist() == [[True, False]]
    algorithm = Algorithm(partial(gdpo, weights={"correct": 1.0}), clip, 4)
    got = algorithm.credit(scores([timeout]), TOKENS)
    assert got.mask.tolist() == [[False, False], [True, False]] and not got.advantages.any()


def test_a_checkpoint_without_its_progress_is_refused(toy):
    """Otherwise later weights would begin at update 0."""
    module = make_module(fresh(toy))
    for lacking in ({"progress": {"updates": 5}}, {"policy_shapes": module.policy_shapes()}):
        with pytest.raises(UserError, match=r"no whole checkpoint of a run: (policy_shapes|progress) is missing"):
            module.on_load_checkpoint(lacking)


def test_a_checkpoint_keeps_the_updates_and_the_entropy_bonus(toy):
    module = make_module(fresh(toy), entropy=EntropyBonus(0.1, target=0.8))
    progress = {"updates": 5, "entropy_coef": 0.04, "last_entropy": 0.7}  # the form of every checkpoint so far
    module.on_load_checkpoint({"policy_shapes": module.policy_shapes(), "progress": progress})
    assert module.updates == 5 and module.entropy.alpha == 0.04
    checkpoint = {"state_dict": {}}
    module.on_save_checkpoint(checkpoint)
    now = {"rollouts": 5, "first_entropy_coef": 0.1, "optimizer": module.given, "loss_scale": {}}  # none in float32
    assert checkpoint["progress"] == progress | now


# -- credit of turns and tokens: one prompt; the first sample has two turns of one token each, with rewards 0.5 and the rest


def two_turns() -> list[Sample]:
    long, short = episode((1,), (2,)), episode((1,), (4,))
    (turn,), (step,) = long.turns, long.trajectory.steps
    later = replace(turn, prompt_ids=(1, 2, 3), completion=replace(turn.completion, ids=(5,), logprobs=(-1.0,)))
    steps = (step, replace(step, state=replace(step.state, reward=0.5)))
    return [replace(long, trajectory=replace(long.trajectory, steps=steps), turns=(turn, later)), short]


def test_rewards_of_turns_add_up_to_the_reward():
    found = replace(scores([two_turns()]), rewards=tensor([[2.0, 1.0]]))
    assert found.steps.isnan().tolist() == [[[False, False], [False, True]]]
    close(found.rewards_of_turns(found.rewards), tensor([[[0.5, 1.5], [1.0, NAN]]]), equal_nan=True)
    assert found.observations == [[["q", "q"], ["q"]]]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (lambda steps: steps, [[0.5, 0.0, 1.5], [1.0, 0.0, 0.0]]),
        (lambda rewards, progress: rewards * progress.share, [[1.0, 0.0, 1.0], [0.5, 0.0, 0.0]]),
        (lambda mask, turn: mask * (turn + 1.0), [[1.0, 0.0, 2.0], [1.0, 0.0, 0.0]]),
        (lambda examples: tensor([[len(example), 0.0] for example in examples]), [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_an_advantage_sees_turns_tokens_examples_and_progress(advantage, expected):
    found = replace(scores([two_turns()]), rewards=tensor([[2.0, 1.0]]), examples=[{"question": "q"}])
    algorithm = Algorithm(advantage, clip, 4)
    check_algorithm(algorithm, 1, 2)
    got = algorithm.credit(found, collate([two_turns()]), Progress(5, 10))
    close(got.advantages, tensor(expected))
