"""Selections, on rollouts whose rewards are chosen here: which prompts are played, and which samples count."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import preset
from helpers.learning import episode
from torch import tensor

from grpo.data.prompts import Uniform
from grpo.engines.protocol import Sampling
from grpo.env.types import Reward
from grpo.extras.losses.importance import truncated
from grpo.extras.selection.selection import Dynamic, Fewer, Greedy, Replay, Screened, WithSignal
from grpo.objectives.advantage import leave_one_out
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.loss import clip
from grpo.rollout.collate import collate, scores
from grpo.rollout.episodes import ENVIRONMENT
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Plan
from grpo.system.errors import RewardError, UserError
from grpo.system.seeds import TRAIN, derive_seed, states_of
from grpo.training.meter import Means, note_engine

WEIGHED = Algorithm(leave_one_out, clip, 8, correction=truncated)


def rollouts(selection, rewards, tmp_path, prompts=2, size=4, algorithm=WEIGHED, **more) -> Rollouts:
    """rewards: from the number of a row and of a sample (-1: the greedy answer) to the reward. A sample's length is its number
    + 1; its seed is in its ids."""

    def play(task, examples, count, engine, renderer, sampling, seed, limits):
        def sample(p, s, row):
            mark, marks = seed(p, s, 0) % 10**6, known.setdefault(row["n"], [])
            if sampling.temperature and mark not in marks:
                marks.append(mark)
            number = marks.index(mark) if sampling.temperature else -1
            value = rewards(row["n"], number)
            one = replace(episode((1,), (mark,) * (number + 1)), example=row)
            return replace(one, reward=Reward(value, value == 1))

        return [[sample(p, s, row) for s in range(count)] for p, row in enumerate(examples)]

    known: dict[int, list[int]] = {}
    engine, sampler = SimpleNamespace(version=0), Uniform([{"n": n} for n in range(8)], prompts, seed=0)
    plan = Plan(prompts, size, 4, Sampling(8))
    return Rollouts(plan, None, sampler, engine, None, algorithm, str(tmp_path), 0, play, selection, **more)


def asked(made: Rollouts, r: int = 0) -> list[int]:
    return [row["n"] for row in made.sampler.draw(r, 8)]


def values(groups) -> list[list[float]]:
    return [[sample.reward.value for sample in group] for group in groups]


def test_further_samples_go_on_with_the_temperatures_or_have_their_own(tmp_path):
    class Several:
        def select(self, draw):
            groups = draw.extend(draw.extend(draw.more(2, 4), 1), 1, temperatures=[0.5])
            return groups + draw.more(1, temperatures=[0.9])

    made, asked_for = rollouts(Several(), lambda n, s: float(s), tmp_path), []
    made.plan = replace(made.plan, sampling=Sampling(8, temperatures=[0.7, 1.0, 1.3]))
    play = made.play
    made.play = lambda *args: (asked_for.append([*args[5].temperatures]), play(*args))[1]
    assert [len(group) for group in made.make(0).groups] == [6, 6, 4]
    assert asked_for == [[0.7, 1.0, 1.3], [1.0, 1.3, 0.7], [0.5], [0.9]]


def test_live_leaves_out_groups_without_signal_and_plays_no_others(tmp_path):
    """Prompts 0 and 4 have equal rewards; without another prompt there is nothing to take in their place."""

    def rewards(n: int, s: int) -> float:
        return 1.0 if n % 4 == 0 else float(s == 0)

    made = rollouts(WithSignal(), rewards, tmp_path, prompts=8)
    batch = made.make(0)
    assert values(batch.groups) == [[1.0, 0.0, 0.0, 0.0]] * 6
    assert [group[0].example["n"] for group in batch.groups] == [n for n in asked(made) if n % 4]
    assert sorted(group[0].example["n"] for group in batch.discarded) == [0, 4]
    assert batch.scores.rewards.tolist() == values(batch.groups)
    assert batch.all_scores.rewards.tolist() == values(batch.played)
    assert (
        values(rollouts(WithSignal(), lambda n, s: 1.0, tmp_path).make(0).groups) == [[1.0] * 4] * 2
    )  # nothing is left
    graded = rollouts(WithSignal(by="correct"), lambda n, s: 0.1 * s, tmp_path)
    assert len(graded.make(0).groups) == len(rollouts(WithSignal(), lambda n, s: 0.1 * s, tmp_path).make(0).groups) == 2
    with pytest.raises(UserError, match="every group would be left out"):
        WithSignal().check(replace(graded.plan, group_size=1), WEIGHED)


def test_gates_replace_groups_that_are_too_easy(tmp_path):
    order = asked(rollouts(Dynamic(), lambda n, s: 0.0, tmp_path))
    easy, hard, *_ = order
    share = {easy: 3, hard: 1}  # right answers of four
    made = rollouts(Dynamic(10, "correct", high=0.5), lambda n, s: float(s < share.get(n, 2)), tmp_path).make(0)
    assert [group[0].example["n"] for group in made.groups] == order[1:3] and made.rounds == 2
    assert [group[0].example["n"] for group in made.played] == order[:4]  # one of two is live: two more are asked
    made = rollouts(Dynamic(10, "correct"), lambda n, s: float(s < share.get(n, 2)), tmp_path).make(0)
    assert made.rounds == 1 and made.scores is made.all_scores
    made = rollouts(Dynamic(10, "correct", low=0.5), lambda n, s: float(s < share.get(n, 2)), tmp_path).make(0)
    assert [group[0].example["n"] for group in made.groups] == [easy, order[2]]
    made = rollouts(Dynamic(10, "reward"), lambda n, s: float(s == 1) if s else math.nan, tmp_path).make(0)
    assert made.rounds == 1  # an unknown reward does not hide those that differ
    last = rollouts(Dynamic(2), lambda n, s: float(n == order[3] and s), tmp_path).make(0)
    assert last.rounds == 2 and [group[0].example["n"] for group in last.groups] == [easy, order[3]]
    with pytest.raises(UserError, match="dynamic sampling would discard every group"):
        rollouts(Dynamic(), lambda n, s: 0.0, tmp_path, size=1)


def test_every_sample_of_every_round_rollout_and_run_has_a_seed_of_its_own(tmp_path):
    """No group has signal, so a rollout plays all 8 prompts, two in a round."""
    seeds, observed = [], []
    for run in (0, 1):
        made = rollouts(Dynamic(10), lambda n, s: 0.0, tmp_path)
        made.seed, made.sampler.observe = run, observed.extend
        for r in (0, 1):
            got = made.make(r)
            assert got.rounds == 4 and got.discarded == got.played[2:]
            seeds += [sample.turns[0].completion.ids[0] for group in got.played for sample in group]
    assert len({*seeds}) == len(seeds) == 2 * 2 * 8 * 4
    assert [example["n"] for example, _ in observed[:8]] == asked(made)  # the sampler hears of what is discarded, too
    played = []
    made.play = lambda *given: played.append(given[6]) or []
    made.one_round(0, [{}], [3], 2)
    made.one_round(0, [{}], [3], 2, skip=2)
    assert len({path(0, ENVIRONMENT, ENVIRONMENT) for path in played}) == 1  # its environments are of one group


def test_an_error_of_the_reward_in_a_later_round_ends_the_run(tmp_path):
    made, rounds = rollouts(Dynamic(), lambda n, s: 0.0, tmp_path), []

    def play(*given, first=made.play):
        rounds.append(given)
        if len(rounds) > 1:
            raise RewardError("it broke")
        return first(*given)

    made.play = play
    with pytest.raises(RewardError, match="it broke"):
        made.make(0)


def test_a_selection_sees_the_shaped_rewards(tmp_path):
    """Rewards 1, 1.1, 1.2, 1.3 for 1 to 4 tokens: 0.5 less for 3 of 4 tokens and 1 less for 4."""
    algorithm = replace(WEIGHED, max_tokens=4, overlong_share=0.5)
    got = rollouts(Fewer(2), lambda n, s: 1 + s / 10, tmp_path, algorithm=algorithm).make(0)
    assert values(got.groups) == [[1.1, 1.3]] * 2 and got.scores.rewards[0].tolist() == pytest.approx([1.1, 0.3])
    assert not got.discarded  # two samples of each group are learned from


def test_all_groups_of_one_round_are_learned_from_though_a_source_gives_more_than_were_asked_for(tmp_path):
    made = rollouts(Dynamic(2), lambda n, s: float(s % 2), tmp_path)
    groups = made.play(None, [{"n": n} for n in range(3)], 2, *[None] * 2, Sampling(8), lambda *path: sum(path), None)
    made.sampler = SimpleNamespace(groups=lambda r, count, first, who: groups)
    assert made.make(0).groups == groups and made.make(0).rounds == 1
    made.selection = Screened(first=2)
    with pytest.raises(UserError, match="which a source cannot: set selection=all or dynamic"):
        made.make(0)


def test_screening_plays_the_rest_only_of_prompts_whose_first_answers_differ(tmp_path):
    made = rollouts(Screened(first=2), lambda n, s: float(n % 2 and s % 2), tmp_path)
    order = asked(made)
    odd = [n for n in order if n % 2][:2]
    got = made.make(0)
    assert [group[0].example["n"] for group in got.groups] == odd and [len(group) for group in got.groups] == [4, 4]
    assert sorted({len(group) for group in got.played}) == [2, 4]  # the others stopped after two
    for number, group in zip(
        odd, got.groups, strict=True
    ):  # a sample's seed is that of its place, as if played at once
        expected = [derive_seed(0, TRAIN, 0, order.index(number), s, 0) % 10**6 for s in range(4)]
        assert [sample.turns[0].completion.ids[0] for sample in group] == expected
    with pytest.raises(UserError, match=r"selection\.first=4 must be at least 2 and below rollout.group_size=4"):
        rollouts(Screened(first=4), lambda n, s: 0.0, tmp_path)
    none = rollouts(Screened(first=2, rounds=1), lambda n, s: 0.0, tmp_path).make(0)
    assert [len(group) for group in none.groups] == [2, 2]  # nothing passed


@pytest.mark.parametrize(("by", "kept"), [("extremes", [0.0, 0.9]), ("short", [0.0, 0.5]), ("efficient", [0.5, 0.9])])
def test_fewer_samples_of_a_group(tmp_path, by, kept):
    """Rewards 0, 0.5, 0.9, 0.6 for 1 to 4 tokens: per token 0, 0.25, 0.3, 0.15."""
    rewards = (0.0, 0.5, 0.9, 0.6)
    got = rollouts(Fewer(2, by), lambda n, s: rewards[s], tmp_path).make(0)
    assert values(got.groups) == [kept, kept] and got.scores.rewards.tolist() == pytest.approx(tensor([kept] * 2))
    assert len(got.played[0]) == 4
    tokens = collate(got.groups)
    mean = sum(kept) / 2  # advantages are of the kept samples alone
    credited = replace(WEIGHED, advantage=lambda rewards: rewards - rewards.mean(1, keepdim=True)).credit(
        got.scores, tokens
    )
    assert credited.advantages[:, 0].tolist() == pytest.approx([kept[0] - mean, kept[1] - mean] * 2, abs=1e-6)
    three = {"extremes": [0.0, 0.9, 0.6], "short": [0.0, 0.5, 0.9], "efficient": [0.5, 0.9, 0.6]}[by]
    assert values(rollouts(Fewer(3, by), lambda n, s: rewards[s], tmp_path).make(0).groups) == [three] * 2
    unknown = rollouts(Fewer(3, by), lambda n, s: math.nan if s == 1 else 0.5, tmp_path).make(0)
    assert values(unknown.groups) == [[0.5] * 3] * 2  # a sample without a reward is never kept
    if by == "efficient":  # -1, -1, 1, -1 earn 0, 0, 2, 0: of equal ones the shortest, as with 0 for wrong answers
        wrong = rollouts(Fewer(2, by), lambda n, s: -1.0 if s != 2 else 1.0, tmp_path).make(0)
        assert [[len(sample.turns[0].completion.ids) for sample in group] for group in wrong.groups] == [[1, 3]] * 2


def test_a_greedy_answer_is_a_part_of_each_sample(tmp_path):
    got = rollouts(Greedy(Fewer(2, "short")), lambda n, s: n + s / 10, tmp_path).make(0)
    (first, *_), numbers = got.groups, [group[0].example["n"] for group in got.groups]
    assert got.scores.parts["greedy"].tolist() == [[pytest.approx(n - 0.1)] * 2 for n in numbers] and len(first) == 2
    assert values(got.groups) == [[n, n + 0.1] for n in numbers]  # the samples keep their own
    assert all("greedy" not in sample.reward.parts for group in got.played for sample in group)


def test_replay_keeps_live_groups_for_a_while_and_a_resumed_one_goes_on(tmp_path):
    selection = Replay(share=1.0, max_age=2)
    made = rollouts(selection, lambda n, s: float(n < 4 and s > 1), tmp_path)
    live = [[n for n in asked(made, r)[:2] if n < 4] for r in range(4)]
    for r in range(3):
        got = made.make(r)
        fresh, old = got.groups[:2], got.groups[2:]
        pool = [(n, r - before) for before in range(max(0, r - 2), r) for n in live[before]]
        assert len(old) == min(2, len(pool)) and {(g[0].example["n"], g[0].age) for g in old} <= {*pool}
        assert fresh == got.played and got.scores.rewards.shape[0] == len(got.groups)
    resumed = Replay(share=1.0, max_age=2)
    resumed.load_state_dict(states_of(made.objects)["selection"])
    expected, again = made.make(3), rollouts(resumed, lambda n, s: float(n < 4 and s > 1), tmp_path).make(3)
    assert [group[0].example for group in again.groups] == [group[0].example for group in expected.groups]
    assert {r for r, _ in selection.kept} <= {1, 2, 3}  # what is too old is not kept either
    selection = Replay(share=0.5, max_age=9)  # one of two prompts is added, drawn anew in each rollout
    selection.kept = [(0, [replace(episode((1,), (2,)), example={"n": n})]) for n in range(8)]
    made = rollouts(selection, lambda n, s: 0.0, tmp_path)
    drawn = [[group[0].example["n"] for group in made.make(r).groups[2:]] for r in (1, 2, 3)]
    assert [len(one) for one in drawn] == [1, 1, 1] and len({n for (n,) in drawn}) > 1
    with pytest.raises(UserError, match="selection=replay: the samples are older than the policy"):
        rollouts(Replay(), lambda n, s: 0.0, tmp_path, algorithm=preset("algo=grpo"))
    with pytest.raises(UserError, match="selection=replay: the samples"):  # inside of another, too
        rollouts(Fewer(2, inner=Replay()), lambda n, s: 0.0, tmp_path, algorithm=preset("algo=grpo"))


def test_replayed_rows_are_no_sign_that_engine_and_trainer_disagree():
    old, new = replace(episode((1,), (2, 3), (-2.0, -2.0)), age=1), episode((1,), (2,), (-0.5,))
    tokens = collate([[old, new]])
    means = Means()
    note_engine(means, replace(tokens, old_logprobs=torch.full((2, 2), -0.4)))
    assert means.result()["rollout/logprob_gap_max"] == pytest.approx(0.1)


def test_replay_of_a_fixed_policy_keeps_the_estimate_unbiased():
    """One token of three, logits z; the policy that is learned from differs from the one that sampled. With old / rollout as
    the correction, the mean gradient over many replayed groups is sum_a pi_a R_a (e_a - pi), the gradient of the expected
    reward."""
    generator = torch.Generator().manual_seed(0)
    sampled_by, policy = tensor([0.2, 0.5, 0.3]).log(), tensor([0.3, 0.3, 0.4]).log()
    rewards = tensor([1.0, 0.0, 0.5])
    pi = policy.exp()
    expected = pi * (rewards - (pi * rewards).sum())  # of the logits
    groups, size = 4000, 4
    drawn = torch.multinomial(sampled_by.exp(), groups * size, replacement=True, generator=generator)
    made = [replace(episode((1,), (int(a),), (float(sampled_by[a]),)), age=3) for a in drawn]
    made = [replace(sample, reward=Reward(float(rewards[a]), False)) for sample, a in zip(made, drawn, strict=True)]
    batch = [made[i : i + size] for i in range(0, len(made), size)]
    algorithm = replace(WEIGHED, advantage=lambda rewards: rewards.clone(), correction=lambda log_w, mask: log_w.exp())
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[drawn][:, None]
    tokens = algorithm.credit(scores(batch), collate(batch))
    tokens = replace(tokens, old_logprobs=logprobs.detach(), weights=algorithm.weights(tokens.mask))
    loss, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), tokens)
    (got,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    each = rewards[drawn] * (policy - sampled_by).exp()[drawn]
    error = 4 * float(each.std()) / math.sqrt(len(drawn))
    assert (got - expected).abs().max() < error
    plain, _ = replace(algorithm, correction=None).loss(logprobs, torch.zeros_like(logprobs), tokens)
    (biased,) = torch.autograd.grad(-plain, logits)
    assert (biased - expected).abs().max() > 2 * error  # the test can tell
