"""Scoring in a run: in threads, with a time limit, while other episodes are still being sampled."""

import asyncio
import json
import math
import sys
import threading
import time

import numpy as np
import pytest
from helpers.episodes import said
from helpers.time_limits import keep_for

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.env.scoring import score_group
from grpo.env.types import Reward, SingleTurn
from grpo.models.pretrained import Pretrained
from grpo.rewards.combined import Rewards
from grpo.rollout.collate import collate, scores
from grpo.rollout.episodes import play
from grpo.rollout.rewarding import THREADS, Scorer
from grpo.system.seeds import derive_seed

HANG = "hang"


class Echo:
    """Scores a text as the number in it; for HANG it never returns, for `burn` it raises."""

    def build(self, example):
        return SingleTurn((Message("user", str(example)),))

    def score(self, example, trajectory):
        if trajectory.answer == HANG:
            threading.Event().wait()
        if trajectory.answer == "burn":
            raise OSError("no network")
        return Reward(float(trajectory.answer), correct=False)


class GroupEcho(Echo):
    """Echo for whole groups: each sample is compared with the best of its group."""

    async def score_group(self, example, trajectories):
        await asyncio.sleep(0)
        values = [self.score(example, trajectory).value for trajectory in trajectories]
        return [Reward(value - max(values), correct=False) for value in values]


class Patient(GroupEcho):
    """GroupEcho that hangs in a coroutine, which does not block other coroutines."""

    async def score_group(self, example, trajectories):
        if any(trajectory.answer == HANG for trajectory in trajectories):
            await asyncio.sleep(3600)
        return await super().score_group(example, trajectories)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    def hangs(key, function, *args) -> bool:
        return function is score_group and HANG in [trajectory.answer for trajectory in args[2]]

    keep_for(monkeypatch, hangs)


def finish(task, *groups, timeout=0.3):
    """Return the rewards and the errors of groups of texts. timeout: seconds for calls with HANG in a text."""

    async def every():
        score = Scorer(task, timeout)
        return await asyncio.gather(*(score({}, [said(text) for text in group]) for group in groups))

    found = asyncio.run(every())
    errors = {place: error for place, (_, error) in enumerate(found) if error}
    return {place: [r.value for r in rewards] for place, (rewards, _) in enumerate(found)}, errors


def test_groups_are_scored_whole_or_sample_by_sample():
    assert finish(Echo(), ["1", "2"], ["3", "4"]) == ({0: [1, 2], 1: [3, 4]}, {})
    assert finish(GroupEcho(), ["1", "2"], ["7", "4"]) == ({0: [-1, 0], 1: [0, -3]}, {})

    class Mine(GroupEcho):
        def score(self, example, trajectory):
            return Reward(9.0, correct=False)

    assert [r.value for r in score_group(Mine(), {}, [said("1")])] == [9.0]  # not the inherited score_group


def test_a_call_that_hangs_is_given_up_and_its_siblings_are_not():
    rewards, errors = finish(Echo(), ["1", "hang", "3"], ["hang", "hang"], ["6"])
    assert rewards[2] == [6] and not errors
    assert [value if value == value else None for value in rewards[0]] == [1, None, 3]
    assert all(map(math.isnan, rewards[1]))
    rewards, errors = finish(Patient(), ["1", "hang"], ["5"])  # one call for both: both rewards are unknown
    assert all(map(math.isnan, rewards[0])) and rewards[1] == [0] and not errors
    finish(GroupEcho(), ["1", "hang"])  # blocks the loop of all coroutines, so a new loop is started
    assert finish(GroupEcho(), ["1", "2"]) == ({0: [-1, 0]}, {})


def test_more_that_hang_than_there_are_threads():
    rewards, errors = finish(Echo(), ["1"], *[["hang"]] * (2 * THREADS), ["2"], timeout=0.1)
    assert rewards[0] == [1] and rewards[2 * THREADS + 1] == [2] and not errors
    assert all(map(math.isnan, rewards[5]))


def test_a_reward_that_never_comes_back_is_broken():
    """A judge that is down costs the timeout once, not once for every sixteen prompts."""
    _, errors = finish(Echo(), *[["hang"] * 2] * (4 * THREADS), timeout=0.1)
    (error,) = errors.values()
    assert "Echo.score did not return within 0.1 s" in str(error)
    assert "calls: fix it, or raise score_timeout" in str(error)


def test_coroutines_share_a_loop():
    """One loop for all, so that a client that belongs to a loop is created once."""
    loops = set()

    class Client(Echo):
        async def score(self, example, trajectory):
            loops.add(asyncio.get_running_loop())
            return Reward(1.0, correct=True)

    async def judge(completions, **columns):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    finish(Client(), ["a", "b"], ["c"])
    Rewards(judge).score({}, [said("a")])
    assert len(loops) == 1


def test_calls_that_hang_are_given_up_side_by_side():
    async def when_the_first_group_is_given_up() -> tuple[int, list]:
        score = Scorer(Echo(), 0.3)
        groups = [asyncio.ensure_future(score({}, [said(HANG)] * 4)) for _ in range(6)]
        await asyncio.wait(groups, return_when=asyncio.FIRST_COMPLETED)
        return score.calls.threads, await asyncio.gather(*groups)

    threads, found = asyncio.run(when_the_first_group_is_given_up())
    assert threads >= THREADS  # one by one: 4
    assert all(math.isnan(reward.value) for rewards, _ in found for reward in rewards)


def test_what_was_given_up_cannot_fail_any_more():
    """The first call fails after its time, while the others wait for that."""
    given_up, failed = threading.Event(), threading.Event()

    class Late(Echo):
        def score(self, example, trajectory):
            if trajectory.answer == HANG:
                given_up.wait(60)
                failed.set()
                raise OSError("late")
            return Reward(float(failed.wait(60)), correct=True)

    async def both():
        score = Scorer(Late(), 0.1)
        late = asyncio.ensure_future(score({}, [said(HANG)]))
        others = asyncio.ensure_future(score({}, [said("1")] * 4))
        first = await late
        given_up.set()
        return first, await others

    ((lost,), no_error), (others, no_other) = asyncio.run(both())
    assert math.isnan(lost.value) and [reward.value for reward in others] == [1] * 4 and not (no_error or no_other)


def test_a_failure_stays_one_while_its_sample_is_looked_for():
    """The search of the first sample alone takes longer than a call may."""
    over = threading.Event()

    class Slow(Echo):
        def score_group(self, example, trajectories):
            if len(trajectories) > 1:
                raise OSError("no network")
            over.wait(60)

    _, errors = finish(Slow(), ["1", "2"])
    over.set()
    assert errors[0].sample is None and "no network" in str(errors[0])


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda: 0.5, "Odd.score gave 0.5: it must give a grpo.env.types.Reward"),
        (lambda: None, "Odd.score gave None"),
        (lambda: Reward(math.inf, True), "Odd.score gave a reward of inf: it must be at most 1e+18 in size"),
        (lambda: sys.exit(3), "Odd.score raised SystemExit: 3"),
    ],
)
def test_what_a_task_gives_is_a_reward(gives, message):
    class Odd(Echo):
        def score(self, example, trajectory):
            return Reward(1.0, True) if trajectory.answer == "good" else gives()

    _, errors = finish(Odd(), ["good", "odd"])
    assert message in str(errors[0]) and errors[0].sample == 1


def test_rewards_become_numbers_that_can_be_written():
    class Arrays(Echo):
        def score(self, example, trajectory):
            return Reward(np.float32(0.5), np.bool_(True), {"a": np.float32(2)})

    (reward,) = score_group(Arrays(), {}, [said("1")])
    assert json.loads(json.dumps([reward.value, reward.correct, reward.parts])) == [0.5, True, {"a": 2.0}]


def test_what_raises_is_named_with_its_sample():
    for task, name in ((Echo(), "Echo.score"), (GroupEcho(), "GroupEcho.score_group")):
        rewards, errors = finish(task, ["1", "2"], ["3", "burn"])
        assert list(errors) == [1] and errors[1].sample == 1 and len(rewards[0]) == 2
        assert str(errors[1]).startswith(f"{name} raised OSError: no network (test_rewarding.py, line ")

    class Short(Echo):
        def score_group(self, example, trajectories):
            return []

    assert "score_group gave 0 rewards for 2 samples" in str(finish(Short(), ["1", "2"])[1][0])


def test_rewards_come_while_others_are_still_generating(toy, toy_model):
    """The engine samples prompt 0 first: its group is scored before the group of prompt 1 has been sampled."""
    engine = TransformersEngine(max_cache_tokens=1000)
    engine.load_weights(toy_model, 0)
    renderer = TemplateRenderer(Pretrained(str(toy)).tokenizer())
    order, first = [], threading.Event()

    class Told(Echo):
        def score(self, example, trajectory):
            order.append(f"scored {example}")
            if len(order) == 2:
                first.set()
            return Reward(float(example), correct=False)

    class Watched:
        context = None

        def sample(self, prompts, sampling, seeds, done):
            found = engine.sample(prompts[:2], sampling, seeds[:2], done)
            assert first.wait(60)
            order.append("sampled the rest")
            return found + engine.sample(prompts[2:], sampling, seeds[2:])  # without calling `done`

    groups = play(Told(), [0, 1], 2, Watched(), renderer, Sampling(4), lambda *path: derive_seed(0, *path))
    assert order == ["scored 0", "scored 0", "sampled the rest", "scored 1", "scored 1"]
    assert [[sample.reward.value for sample in group] for group in groups] == [[0, 0], [1, 1]]
    assert scores(groups).rewards.tolist() == [[0, 0], [1, 1]] and len(collate(groups)) == 4


def test_a_reward_with_a_state_is_called_in_order(toy, toy_model):
    """The group of prompt 1 is sampled first, and the first sample of each group takes longer to score."""
    engine = TransformersEngine(max_cache_tokens=1000)
    engine.load_weights(toy_model, 0)
    calls = []

    class Falling(Echo):
        def score(self, example, trajectory):
            number = len(calls)
            time.sleep(0.1 * (1 - number % 2))
            calls.append((example, trajectory.answer))
            return Reward(-float(number), correct=False)

        def state_dict(self):
            return {"calls": len(calls)}

    class Backwards:
        context = None

        def sample(self, prompts, sampling, seeds, done):
            later = engine.sample(prompts[2:], sampling, seeds[2:], lambda i, completion: done(i + 2, completion))
            return engine.sample(prompts[:2], sampling, seeds[:2]) + later

    renderer = TemplateRenderer(Pretrained(str(toy)).tokenizer())
    groups = play(Falling(), [0, 1], 2, Backwards(), renderer, Sampling(4), lambda *path: derive_seed(0, *path))
    assert calls == [(p, sample.trajectory.answer) for p, group in enumerate(groups) for sample in group]
    assert [[sample.reward.value for sample in group] for group in groups] == [[0, -1], [-2, -3]]


def test_an_engine_tells_of_each_completion_once(toy, toy_model):
    engine, heard = TransformersEngine(max_cache_tokens=40), {}
    engine.load_weights(toy_model, 0)
    prompts, seeds = [(5, 6), (5, 6), (7,), (8, 9), (7,)], [1, 2, 3, 4, 5]
    found = engine.sample(prompts, Sampling(12), seeds, lambda i, completion: heard.update({i: completion}))
    assert [heard[i] for i in range(5)] == found and len(heard) == 5
    assert found == engine.sample(prompts, Sampling(12), seeds)
