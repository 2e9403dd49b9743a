"""Environments that give their own reward, are closed, share a seed in their group, and are seen by the score."""

import math
import random
import threading
import time
from dataclasses import dataclass

import pytest
from conftest import seed
from helpers.serving import until
from helpers.time_limits import keep_for

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.types import Action, Reward, State
from grpo.rollout.episodes import ENVIRONMENT, play
from grpo.rollout.prompt_limit import prompt_tokens
from grpo.rollout.types import Limits
from grpo.system.seeds import own_randomness

ASK = State((Message("user", "Which number?"),))


class Game:
    """Ends as its example says, after one turn or more."""

    def __init__(self, example, seeds, closed):
        self.kind, self.seeds, self.closed, self.turns = example["kind"], seeds, closed, 0

    def start(self):
        return ASK

    def step(self, action: Action):
        self.turns, self.heard = self.turns + 1, action.message
        if self.kind == "raises":
            raise ValueError("broken")
        if self.kind == "hangs":
            threading.Event().wait(60)
        if self.kind == "by step":
            return Reward(0.25, True, {"moves": self.turns})
        return None if self.kind in ("after the end", "silent") else ASK

    async def outcome(self):
        if self.kind == "after the end":
            return Reward(2.0, False)
        if self.kind == "odd outcome":
            return "won"
        return Reward(-1.0, False) if self.kind == "never ends" else None

    def close(self):
        self.closed.append(self)


@dataclass
class Games:
    """A task without a score: the environments give the rewards."""

    closed: list

    def build(self, example, seed, group_seed):
        return Game(example, (seed, group_seed), self.closed)


KINDS = ["by step", "after the end", "never ends", "silent", "raises", "hangs", "odd outcome"]


def test_an_environment_gives_its_reward_and_is_closed_however_its_episode_ends(parts, monkeypatch):
    task = Games([])
    hangs = [((KINDS.index("hangs"), s), "step") for s in range(2)]
    keep_for(monkeypatch, lambda place, function, *_: (place, function.__name__) in hangs)
    examples = [{"kind": kind} for kind in KINDS]
    groups = play(
        task, examples, 2, *parts, Sampling(2), seed, Limits(max_turns=2, step_timeout=1)
    )  # two tokens are a cut answer
    found = {kind: (group[0].trajectory.end, group[0].reward.value) for kind, group in zip(KINDS, groups, strict=True)}
    unknown = {kind: end for kind, (end, value) in found.items() if math.isnan(value)}
    assert unknown == {"silent": "truncated", "raises": "env_error", "hangs": "env_timeout", "odd outcome": "env_error"}
    assert found["by step"] == ("truncated", 0.25) and groups[0][0].reward.parts == {"moves": 1}
    assert groups[0][0].reward.correct
    assert found["after the end"] == ("truncated", 2.0) and found["never ends"] == ("truncated", -1.0)
    assert sorted(game.kind for game in task.closed) == sorted(KINDS * 2)
    seeds = {kind: [game.seeds for game in task.closed if game.kind == kind] for kind in KINDS}
    assert all(a[1] == b[1] and a[0] != b[0] for a, b in seeds.values())  # one problem, other chances
    assert len({group for pair in seeds.values() for _, group in pair}) == len(KINDS)


def test_a_reward_stays_with_its_sample_where_a_sibling_fails(parts):
    failing = seed(0, 0, ENVIRONMENT)

    class Half(Games):
        def build(self, example, seed, group_seed):
            return super().build({"kind": "raises" if seed == failing else "by step"}, seed, group_seed)

    [group] = play(Half([]), [{}], 3, *parts, Sampling(2), seed)
    assert math.isnan(group[0].reward.value) and [sample.reward.value for sample in group[1:]] == [0.25, 0.25]


def test_a_score_sees_the_environment_before_it_is_closed(parts):
    class Seen(Games):
        def score(self, example, trajectory, env):
            assert env not in self.closed and env.heard == trajectory.steps[-1].action.message
            return Reward(float(env.turns), trajectory.reward is not None and trajectory.reward.correct)

    class SeenTogether(Games):
        def score_group(self, example, trajectories, envs):
            return [Reward(float(len(envs)), False) for env in envs if env not in self.closed]

    example = [{"kind": "by step"}]
    [group] = play(Seen([]), example, 2, *parts, Sampling(2), seed)
    assert [(s.reward.value, s.reward.correct) for s in group] == [(1.0, True)] * 2
    [group] = play(SeenTogether([]), example, 3, *parts, Sampling(2), seed)
    assert [s.reward.value for s in group] == [3.0] * 3


def test_environments_are_closed_when_the_run_ends_in_the_middle(parts):
    """The engine stops in its second call, as it does for Ctrl-C, while a third of the environments still thinks."""
    engine, renderer = parts
    built = []

    class Built(Games):
        def build(self, example, seed, group_seed):
            built.append(super().build(example, seed, group_seed))
            return built[-1]

    task, sample = Built([]), engine.sample

    def stopping(*args):
        engine.calls += 1
        if engine.calls == 2:
            raise KeyboardInterrupt
        return sample(*args)

    engine.calls, engine.sample = 0, stopping
    with pytest.raises(KeyboardInterrupt):
        play(task, [{"kind": "never ends"}] * 3, 1, engine, renderer, Sampling(2), seed)
    assert built
    until(lambda: {id(env) for env in task.closed} == {id(env) for env in built})  # one may be built after the end


def test_an_environment_that_is_built_too_late_is_closed_at_once(parts):
    class Late(Game):
        async def close(self):
            self.closed.append(self)

    class Slow(Games):
        def build(self, example, seed, group_seed):
            given_up.wait(60)
            return Late(example, (seed, group_seed), self.closed)

    task, given_up = Slow([]), threading.Event()
    with pytest.raises(Exception, match="the environment failed in all 2 episodes"):
        play(task, [{"kind": "silent"}], 2, *parts, Sampling(2), seed, Limits(step_timeout=0.2))
    given_up.set()
    end = time.monotonic() + 60
    while len(task.closed) < 2 and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert len(task.closed) == 2


def test_the_look_at_prompts_closes_its_environments(parts):
    task = Games([])
    assert prompt_tokens(task, {"kind": "silent"}, parts[1]) > 0 and len(task.closed) == 1

    class Broken(Game):
        def start(self):
            raise OSError("no display")

    class Breaks(Games):
        def build(self, example, seed, group_seed):
            return Broken(example, (seed, group_seed), self.closed)

    task = Breaks([])
    assert prompt_tokens(task, {"kind": "silent"}, parts[1]) == 0 and len(task.closed) == 1


def test_a_close_that_fails_harms_nothing(parts, caplog):
    class Leaking(Game):
        def close(self):
            raise OSError("no such container")

    class Leaks(Games):
        def build(self, example, seed, group_seed):
            return Leaking(example, (seed, group_seed), self.closed)

    [group] = play(Leaks([]), [{"kind": "by step"}], 1, *parts, Sampling(2), seed)
    assert (
        group[0].reward.value == 0.25
        and "an environment could not be closed: OSError: no such container" in caplog.text
    )


def test_a_library_that_seeds_the_global_generators_disturbs_nobody():
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    drawn = []

    def library():
        with own_randomness():
            random.seed(5)
            drawn.append(random.random())

    for value in expected:
        threads = [threading.Thread(target=library) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert random.random() == value
    assert len(drawn) == 32 and set(drawn) == {random.Random(5).random()}
