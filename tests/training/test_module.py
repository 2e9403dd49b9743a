"""From episodes to gradients: batches, log-probabilities, and an update that does not depend on microbatches."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.learning import ADVANTAGES, GROUPS, episode, fresh, make_module, rollout, trained
from peft import LoraConfig
from torch import tensor
from transformers import get_scheduler

from grpo.models.logprobs import completion_logprobs
from grpo.models.policy import with_adapter
from grpo.models.temperature import at_half_of_it
from grpo.objectives.trial import even_batch
from grpo.rollout.collate import collate
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.training import module as training
from grpo.training.meter import Means, note_loss
from grpo.training.optimization import Optimization


def test_collate_pads_prompts_left_and_completions_right():
    groups = [GROUPS[0], [episode((14,), (24, 25, 26), (-1.0, -2.0, -3.0)), episode((14,), (27,))]]
    batch = collate(groups)
    assert batch.ids.tolist() == [
        [11, 12, 13, 21, 22, 0],
        [11, 12, 13, 23, 0, 0],
        [0, 0, 14, 24, 25, 26],
        [0, 0, 14, 27, 0, 0],
    ]
    assert batch.attention_mask.tolist()[1:3] == [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert batch.mask.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.rollout_logprobs[2].tolist() == [-1.0, -2.0, -3.0]
    assert batch.sample.tolist() == [0, 1, 2, 3]


def test_rows_lose_the_columns_that_only_pad():
    batch = collate(GROUPS)
    short = batch.rows(tensor([1, 0]))
    assert short.ids.tolist() == [[11, 12, 13, 23, 0], [11, 12, 13, 21, 22]]
    assert short.mask.shape == short.rollout_logprobs.shape == (2, 2)
    assert batch.rows(tensor([2])).ids.tolist() == [[14, 24, 25, 26, 27]]


def test_logprobs_are_those_of_a_lone_unpadded_forward(toy_model):
    batch = collate(GROUPS)
    for temperature in (1.0, 0.7):
        got, entropy = completion_logprobs(toy_model, batch, temperature)
        rows = [episode.turns[0] for group in GROUPS for episode in group]
        for row, turn in enumerate(rows):
            ids = tensor([turn.prompt_ids + turn.completion.ids])
            expected = (toy_model(ids).logits[0, :-1] / temperature).log_softmax(-1)
            first, n = len(turn.prompt_ids) - 1, len(turn.completion.ids)
            alone = expected[first:].gather(-1, ids[0, first + 1 :, None]).squeeze(-1)
            torch.testing.assert_close(got[row, :n], alone, atol=1e-5, rtol=0)
            exact = -(expected[first:].exp() * expected[first:]).sum(-1)
            torch.testing.assert_close(entropy[row, :n], exact, atol=1e-4, rtol=0)


def test_the_second_pass_compares_each_row_with_what_it_was_in_the_first(toy, monkeypatch):
    """At a rate of 0 the policy stays, so no ratio differs from 1, in microbatches of one row too. The memory
    of each goes back to the system, if it is much."""
    freed = []
    monkeypatch.setattr(training.memory, "give_back", freed.append)
    _, metrics = trained(fresh(toy), max_tokens_per_microbatch=1, num_epochs=2, lr=0.0)
    assert metrics["loss/approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["loss/clip_fraction_low"] == 0
    assert freed == 2 * sum(map(len, GROUPS)) * [training.memory.KEPT]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_rows_without_a_completion_alone_in_a_microbatch_or_minibatch(toy, layout):
    """An engine may end an answer before its first token. The others are learned from as if the empty ones were not cut apart."""
    empty = [[episode((11, 12), ()), episode((11, 12), ())], [episode((14,), (24, 25)), episode((14,), (28,))]]
    assert [values.shape for values in completion_logprobs(fresh(toy), collate(empty[:1]), 1.0, layout=layout)] == [
        (2, 0)
    ] * 2
    found = []
    for max_tokens in (1000, 1):
        got, metrics = trained(
            fresh(toy), rollout(groups=empty), max_tokens_per_microbatch=max_tokens, layout=layout, num_epochs=2
        )
        found.append(got)
        assert metrics["loss/grad_norm"] > 0.01
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=0)
    _, metrics = trained(fresh(toy), rollout(groups=empty), layout=layout, num_minibatches=2)
    assert metrics["loss/grad_norm"] > 0.01 and metrics["loss/skipped"] == 0


def test_a_schedule_is_tried_with_its_warm_up_and_refused_for_what_it_does():
    """A polynomial schedule divides by the updates after the warm-up: by 0 at the last update if there are none."""
    schedule = partial(get_scheduler, name="polynomial", num_warmup_steps=1)
    optim = Optimization(partial(torch.optim.SGD, lr=0.1), schedule)
    small = optim.optimizer([("weight", torch.zeros(1, requires_grad=True))])
    scheduled = optim.scheduled(small, num_updates=3)
    assert scheduled.get_last_lr() == [0.0]  # it has not moved
    with pytest.raises(UserError, match=r"optim\.schedule: division by zero .*in a run of 1 update,"):
        optim.scheduled(small, num_updates=1)


@pytest.mark.parametrize(("share", "rates"), [(None, [0.0, 0.1, 0.1]), (0.5, [0.0, 0.1 / 2, 0.1])])
def test_the_warm_up_is_a_share_of_the_updates(share, rates):
    """Half of 3 updates are 2, in which the rate rises from 0 to 0.1; without a share it is the schedule's own 1."""
    schedule = partial(get_scheduler, name="constant_with_warmup", num_warmup_steps=1)
    optim = Optimization(partial(torch.optim.SGD, lr=0.1), schedule, warmup_ratio=share)
    optimizer = optim.optimizer([("weight", torch.zeros(1, requires_grad=True))])
    scheduled, found = optim.scheduled(optimizer, num_updates=3), []
    for _ in range(3):
        found += scheduled.get_last_lr()
        optimizer.step()
        scheduled.step()
    assert found == pytest.approx(rates)


def test_first_update_follows_the_policy_gradient_worked_by_autograd(toy):
    """At ratio 1 the gradient of the loss equals the gradient of -mean_i mean_t A_i log pi(o_t)."""
    policy = fresh(toy)
    batch = collate(GROUPS)
    logprobs, _ = completion_logprobs(policy, batch, 1.0)
    means = (logprobs * batch.mask).sum(1) / batch.mask.sum(1)
    gradients = torch.autograd.grad(-(ADVANTAGES.flatten() * means).mean(), list(policy.parameters()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(policy.named_parameters(), gradients, strict=True)}
    got, metrics = trained(fresh(toy), reduce="sequence")
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=1e-6, rtol=0)
    assert metrics["loss/approx_kl"] == 0.0 and metrics["loss/policy"] == pytest.approx(-0.15)
    # -(1 x 2 - 1 x 1 + 0.5 x 4 - 0.5 x 3) / 10, over all tokens
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert metrics["loss/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_each_update_follows_its_own_gradient_at_its_own_rate(toy):
    """The rate falls by a quarter of its start with each of four updates, and no gradient is left over from the one before."""
    module, policy, batch = make_module(fresh(toy)), fresh(toy), collate(GROUPS)
    for r, rate in enumerate((0.1, 0.075)):
        assert "rollout/logprob_gap" in module.training_step(rollout(r), 0)  # of every rollout
        logprobs, _ = completion_logprobs(policy, batch, 1.0)
        loss = -(ADVANTAGES.flatten() * logprobs.sum(1) / batch.mask.sum(1)).mean()
        for p, gradient in zip(policy.parameters(), torch.autograd.grad(loss, [*policy.parameters()]), strict=True):
            p.data -= rate * gradient
    for p, q in zip(module.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_weights_make_up_for_the_mean_of_the_ranks_gradients(toy, monkeypatch):
    _, alone = trained(fresh(toy))
    monkeypatch.setattr(training, "distributed", SimpleNamespace(**{**vars(distributed), "world_size": lambda: 2}))
    _, one_of_two = trained(fresh(toy))
    assert one_of_two["loss/grad_norm"] == pytest.approx(2 * alone["loss/grad_norm"], rel=1e-4)


def test_after_a_lack_of_memory_the_update_is_made_in_smaller_pieces(toy, caplog, monkeypatch):
    """Four rows have 5 tokens each. The second pass of two rows finds no memory, when the first has added its gradient."""
    monkeypatch.setattr("grpo.models.packing.padding_error", lambda model: "")  # its passes do not count

    def without_memory(policy, most, passes):
        def check(module, args, kwargs):
            passes.append(kwargs["input_ids"].numel())
            if len(passes) > 1 and passes[-1] > most:
                raise torch.OutOfMemoryError("no memory")

        policy.register_forward_pre_hook(check, with_kwargs=True)
        return policy

    rows = rollout(groups=[[episode((11, 12, 13), (i, i + 1)) for i in (20, 23)] for _ in range(2)])
    expected, _ = trained(fresh(toy), rows, max_tokens_per_microbatch=5, layout="padded")
    passes = []
    policy = without_memory(fresh(toy), 5, passes)
    got, metrics = trained(policy, rows, max_tokens_per_microbatch=10, layout="padded")
    assert passes == [10, 10, 5, 5, 5, 5]
    assert all(torch.equal(got[name], expected[name]) for name in expected) and metrics["loss/skipped"] == 0
    assert "out of memory: from now on optim.max_tokens_per_microbatch=5" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        trained(without_memory(fresh(toy), 4, []), rows, max_tokens_per_microbatch=10, layout="padded")


def test_what_padding_predicts_cannot_reach_the_loss(toy):
    """The model is so confident that padding tokens have log-probabilities below -100, for which exp overflows."""
    policy = fresh(toy)
    with torch.no_grad():
        policy.model.norm.weight.mul_(300)
    module = make_module(policy, kl_coef=0.1, num_epochs=2, lr=1e-6, max_tokens_per_microbatch=10)
    metrics = module.training_step(rollout(), 0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_every_pass_has_the_temperature_of_the_sampling(toy_model):
    exact, _ = completion_logprobs(toy_model, collate(GROUPS), 0.7)
    batch = rollout(tokens=replace(collate(GROUPS), rollout_logprobs=exact.detach()))
    for settings in (
        {},
        {"num_minibatches": 2, "kl_coef": 0.1},
    ):  # with its own log-probabilities, and with frozen ones
        module = make_module(toy_model, lr=1e-9, **settings)
        module.temperature = 0.7
        metrics = module.training_step(batch, 0)
        assert metrics["rollout/logprob_gap_max"] < 1e-5
        assert metrics["loss/ratio"] == pytest.approx(1, abs=1e-5) and metrics.get("loss/kl", 0) < 1e-8


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_the_gradient_of_two_temperatures_is_the_sum_of_those_of_each_alone(toy, layout):
    """The first sample of each group was drawn at 0.7, the second at the run's 1.3; alone, the others have advantage 0."""

    def step(groups, temperature: float, rewards) -> torch.Tensor:
        policy, start = fresh(toy), fresh(toy)
        module = make_module(policy, layout=layout, reduce="sequence")
        module.temperature = temperature
        module.training_step(rollout(groups=groups, rewards=rewards), 0)
        pairs = zip(policy.parameters(), start.parameters(), strict=True)
        return torch.cat([(p.detach() - q.detach()).flatten() for p, q in pairs])

    mixed = [[drawn_at(first, 0.7), second] for first, second in GROUPS]
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    alone = step(GROUPS, 0.7, ADVANTAGES * first) + step(GROUPS, 1.3, ADVANTAGES * (1 - first))
    together = step(mixed, 1.3, ADVANTAGES)
    torch.testing.assert_close(together, alone, atol=3e-7, rtol=1e-5)
    assert (together - step(GROUPS, 1.3, ADVANTAGES)).norm() > 0.1 * together.norm()


def test_frozen_log_probabilities_and_the_squares_of_probabilities_have_each_rows_temperature(toy_model):
    """Policy and reference are equal, so the KL is 0; at half of its temperature a row is what it is alone."""
    mixed = [[drawn_at(first, 0.7), second] for first, second in GROUPS]
    module = make_module(toy_model, lr=1e-9, kl_coef=0.1)
    assert module.training_step(rollout(groups=mixed), 0)["loss/kl"] < 1e-8
    tokens = collate(mixed)
    half, _ = completion_logprobs(toy_model, at_half_of_it(tokens, 1.0), 1.0)
    for row, temperature in enumerate((0.7, 1.0, 0.7, 1.0)):
        exact, _ = completion_logprobs(toy_model, collate(GROUPS).rows(slice(row, row + 1)), temperature / 2)
        torch.testing.assert_close(
            half[row][tokens.mask[row]], exact[0][: int(tokens.mask[row].sum())], atol=1e-5, rtol=0
        )


def drawn_at(sample, temperature: float):
    """Return a sample whose tokens were sampled at a temperature."""
    turns = [replace(turn, completion=replace(turn.completion, temperature=temperature)) for turn in sample.turns]
    return replace(sample, turns=tuple(turns))


def test_minibatches_differ_between_epochs_rollouts_and_runs(toy_model):
    """Each is one of the two groups, drawn at random. An update counts half of the samples: of four, and then of three."""

    def orders(seed, rollouts, epochs=1):
        module, first, counts = make_module(toy_model, num_minibatches=2, num_epochs=epochs), [], []
        module.seed, module.freeze = seed, lambda tokens: replace(tokens, old_logprobs=tokens.rollout_logprobs)

        def update(minibatch, means, count):
            counts.append(count)
            first.append(minibatch.sample.tolist())

        module.update = update
        for r in range(rollouts):
            module.training_step(rollout(r), 0)
        three = rollout(0, groups=[GROUPS[0], GROUPS[1][:1]])
        three.groups = [GROUPS[0], GROUPS[1][:1]]
        module.training_step(three, 0)
        assert counts == [2] * (2 * epochs * rollouts) + [1.5] * (2 * epochs)
        return first[: -2 * epochs : 2]

    by_rollout = orders(0, 8)
    assert sorted(map(tuple, {*map(tuple, by_rollout)})) == [(0, 1), (2, 3)]
    assert by_rollout != orders(1, 8) and by_rollout == orders(0, 8)
    assert len({*map(tuple, orders(0, 1, epochs=8))}) == 2


def test_zero_advantages_change_nothing(toy):
    before = fresh(toy)
    after, metrics = trained(fresh(toy), rollout(rewards=torch.zeros(2, 2)))
    assert all(torch.equal(after[name], p) for name, p in before.named_parameters())
    assert metrics["loss/grad_norm"] == 0.0


def test_logprob_gap_is_engine_against_trainer(toy):
    policy = fresh(toy)
    tokens = collate(GROUPS)
    exact, _ = completion_logprobs(policy, tokens, 1.0)
    tokens = replace(tokens, rollout_logprobs=(exact + 0.25).detach())
    _, metrics = trained(policy, rollout(tokens=tokens))
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("advantages", [ADVANTAGES, torch.zeros(2, 2), ADVANTAGES * torch.eye(2)[:1].T])
@pytest.mark.parametrize("seed", [0, 1])  # of the order of minibatches
@pytest.mark.parametrize("old_policy", ["trainer", "rollout"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gap_is_measured_in_every_rollout(toy_model, advantages, seed, old_policy, minibatches):
    """Also if no group has signal, or only one does, with any number of minibatches. The engine reports 0.25 nats too much."""
    exact, _ = completion_logprobs(toy_model, tokens := collate(GROUPS), 1.0)
    batch = rollout(seed, advantages, tokens=replace(tokens, rollout_logprobs=(exact + 0.25).detach()))
    module = make_module(toy_model, old_policy=old_policy, num_minibatches=minibatches)
    metrics = module.training_step(batch, 0)
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.25, abs=1e-5)
    k3 = math.exp(-0.25) - 1 + 0.25 if old_policy == "rollout" else 0.0
    assert metrics.get("loss/first_kl", k3) == pytest.approx(k3, abs=1e-5)


def unpadded(tokens) -> list[tuple[int, ...]]:
    return [tuple(ids[keep.bool()].tolist()) for ids, keep in zip(tokens.ids, tokens.attention_mask, strict=True)]


def test_epochs_compare_with_the_policy_before_the_first(toy):
    """Old log-probabilities stay frozen: in later epochs the policy moves away from them until the clip stops it."""
    policy = fresh(toy)
    module = make_module(policy, num_epochs=3, num_minibatches=2, lr=0.1, kl_coef=0.01)
    seen = []
    inner = module.update
    module.update = lambda minibatch, *rest: (seen.append(minibatch), inner(minibatch, *rest))
    tokens = collate(GROUPS)
    start, _ = completion_logprobs(fresh(toy), tokens, 1.0)
    metrics = module.training_step(rollout(tokens=tokens), 0)

    assert len(seen) == 6 and all(len(minibatch) == 2 for minibatch in seen)
    row_of = {ids: row for row, ids in enumerate(unpadded(tokens))}
    for minibatch in seen:
        for i, ids in enumerate(unpadded(minibatch)):
            n = int(minibatch.mask[i].sum())
            expected = start[row_of[ids], :n].detach()
            torch.testing.assert_close(minibatch.old_logprobs[i, :n], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(minibatch.reference_logprobs[i, :n], expected, atol=1e-5, rtol=0)
    for epoch in range(3):  # every epoch sees every row once
        assert sorted(unpadded(seen[2 * epoch]) + unpadded(seen[2 * epoch + 1])) == sorted(row_of)
    assert metrics["loss/approx_kl"] > 1e-4 and metrics["loss/clip_fraction_high"] > 0
    losses = [metrics[f"loss/policy_epoch_{k}"] for k in (1, 2, 3)]  # of equally many tokens; the policy learns
    assert sum(losses) / 3 == pytest.approx(metrics["loss/policy"]) and losses[2] < losses[0] - 1e-3
    known = torch.cat([base[: int(mask.sum())] for base, mask in zip(start.detach(), tokens.mask, strict=True)])
    assert metrics["rollout/old_logprobs"] == pytest.approx(float(known.mean()), abs=1e-5)
    assert metrics["rollout/old_logprobs_std"] == pytest.approx(float(known.std(correction=0)), abs=1e-4)
    assert metrics["rollout/rollout_logprobs_std"] == pytest.approx(0, abs=1e-4)  # each is -0.5
    # 1, -1, 0.5 and -0.5
    assert (metrics["rollout/advantages_mean"], metrics["rollout/advantages_positive"]) == (0.0, 2.0)
    assert metrics["rollout/advantages_std"] == pytest.approx(math.sqrt(2.5 / 4))
    assert metrics["lr"] == pytest.approx(
        0.1 * (1 + 23 / 24 + 22 / 24 + 21 / 24 + 20 / 24 + 19 / 24) / 6
    )  # linear over 24


def test_reference_stays_where_the_run_began(toy):
    policy = fresh(toy)
    module = make_module(policy, kl_coef=0.1, lr=1.0)
    tokens = collate(GROUPS)
    start = module.freeze(tokens).reference_logprobs
    module.training_step(rollout(tokens=tokens), 0)
    metrics = module.training_step(rollout(1, tokens=tokens), 0)
    assert torch.equal(module.freeze(tokens).reference_logprobs, start)
    assert metrics["loss/kl"] > 1e-3
    assert not any("reference" in name for name in module.state_dict())


def test_no_kl_no_reference(toy):
    assert make_module(fresh(toy)).reference is None


def test_lora_reference_is_the_base_and_only_the_adapter_learns(toy):
    torch.manual_seed(0)
    policy = with_adapter(fresh(toy), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    module = make_module(policy, kl_coef=0.1, lr=5.0)
    assert module.reference.copy is None  # no second copy of the weights
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    tokens = collate(GROUPS)
    base, _ = completion_logprobs(fresh(toy), tokens, 1.0)
    first = module.training_step(rollout(tokens=tokens), 0)
    second = module.training_step(rollout(1, tokens=tokens), 0)
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-6) and second["loss/kl"] > 1e-5
    torch.testing.assert_close(module.freeze(tokens).reference_logprobs, base.detach(), atol=1e-5, rtol=0)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)


def test_means_weigh_by_what_they_count():
    means = Means()
    means.add("x", 6.0, 3)
    means.add("x", 2.0, 1)
    assert means.result() == {"x": 2.0}
    means.add("x^2", 4.0 + 4.0 + 4.0 + 8.0, 4)
    assert means.result() == {"x": 2.0, "x_std": 1.0}  # 20 / 4 - 2^2


def test_the_effective_sample_size_is_that_of_all_tokens_of_the_update():
    """Weights 3 and 1 in one microbatch, 1 and 1 in the other: 6^2 / (4 x 12), not the mean of 16 / 20 and 1."""
    means = Means()
    for first in (3.0, 1.0):
        batch = replace(even_batch(1, 3, -2.0), advantages=torch.ones(1, 3), mask=torch.tensor([[True, True, False]]))
        logprobs = -2.0 + torch.tensor([[first, 1.0, 9.0]]).log()  # the last is padding
        note_loss(means, batch, logprobs, {"ratio": torch.ones(1, 3)})  # the old policy is not the one that sampled
    found = means.result()
    assert found["loss/effective_samples"] == pytest.approx(0.75)
    assert not {name for name in found if name.endswith(("^2", "_std"))}
    note_loss(none := Means(), batch, logprobs, {})
    assert "loss/effective_samples" not in none.result()  # an objective without a ratio


def test_the_loss_of_an_epoch_is_that_of_its_tokens():
    means, alone = Means(), Means()
    for epoch, (total, count) in enumerate([(6.0, 3), (2.0, 1), (0.0, 0)]):
        means.add("loss/policy", total, count)
        means.end_epoch(epoch, 3)
    found = {"loss/policy": 2.0, "loss/policy_epoch_1": 2.0, "loss/policy_epoch_2": 2.0}
    assert means.result() == found  # in the third every update was skipped
    alone.add("loss/policy", 6.0, 3)
    alone.end_epoch(0, 1)
    assert alone.result() == {"loss/policy": 2.0}
