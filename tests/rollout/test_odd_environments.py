"""A user's environment, however it fails, ends only its own episode."""

import asyncio
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
from conftest import preset, seed
from helpers.time_limits import keep_for

from grpo.data.prompts import Uniform
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.types import Reward, State
from grpo.extras.terminal.callback import sample_panel
from grpo.rollout.episodes import play
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.samples_table import records
from grpo.rollout.types import Limits, Plan
from grpo.system.calls import awaited
from grpo.system.errors import RolloutError, UserError
from grpo.training.callbacks.samples import write

ASKED = State((Message("user", "q"),))


class Starting:
    """A task whose examples are functions, each the `start` of its environment. One turn, and a reward of 1."""

    def build(self, example):
        return SimpleNamespace(start=example, step=lambda action: None)

    def score(self, example, trajectory):
        return Reward(1.0, correct=True)


def fine():
    return ASKED


@pytest.fixture
def started(parts, monkeypatch):
    """Return a function that plays one episode per `start` and returns the samples. timeout: of the first episode."""

    def of(*starts, timeout: float = 60.0):
        keep_for(monkeypatch, lambda place, *_: place == (0, 0))
        limits = Limits(step_timeout=timeout)
        groups = play(Starting(), starts, 1, *parts, Sampling(2), seed, limits)
        return [sample for group in groups for sample in group]

    return of


def test_an_episode_that_comes_while_the_engine_is_at_work_is_played(parts):
    """The slow one starts while the quick one's only completion is being sampled, and asks before that is finished."""
    engine, renderer = parts
    release, asked = threading.Event(), threading.Event()

    def slow():
        release.wait(60)
        asked.set()
        return ASKED

    class Watched:
        context = None

        def sample(self, prompts, *rest):
            release.set()
            assert asked.wait(60)
            time.sleep(0.1)
            return engine.sample(prompts, *rest)

    groups = play(Starting(), [fine, slow], 1, Watched(), renderer, Sampling(2), seed)
    assert [len(group[0].turns) for group in groups] == [1, 1]
    assert [group[0].reward.value for group in groups] == [1.0, 1.0]


def test_all_coroutines_share_a_loop_from_the_very_first():
    """In a fresh process, 32 threads ask for the first event loop at the same time."""
    script = """
import asyncio, threading
from grpo.system.calls import awaited
async def loop():
    return asyncio.get_running_loop()
found, together = [], threading.Barrier(32)
def ask():
    together.wait()
    found.append(awaited(loop()))
threads = [threading.Thread(target=ask) for _ in range(32)]
[t.start() for t in threads], [t.join() for t in threads]
print(len(found), len(set(found)))
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
        assert done.stdout.split() == ["32", "1"], done.stderr


def test_a_plain_environment_whose_coroutine_blocks_leaves_the_next_ones_a_loop(started):
    release = threading.Event()

    async def blocks():
        release.wait(60)

    def stuck():
        awaited(blocks())

    def later():
        awaited(asyncio.sleep(0))
        return ASKED

    try:
        assert started(stuck, fine, timeout=1.0)[0].trajectory.end == "env_timeout"
        assert len(started(later)[0].turns) == 1
    finally:
        release.set()


def test_a_coroutine_that_ends_in_an_odd_way_ends_its_own_episode(started):
    async def leaves():
        await asyncio.sleep(0.1)
        sys.exit("bye")

    async def cancels():
        raise asyncio.CancelledError

    async def goes_on():
        await asyncio.sleep(0.3)
        return ASKED

    ends = [(s.trajectory.end, len(s.turns), s.trajectory.error) for s in started(leaves, cancels, goes_on)]
    assert [end[:2] for end in ends[:2]] == [("env_error", 0)] * 2 and ends[2][1] == 1
    assert ends[0][2].startswith("RuntimeError: SystemExit: bye (test_odd_environments.py")
    assert ends[1][2].startswith("CancelledError")


def test_an_exception_without_words_is_an_error_like_others(started):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def fails():
        raise Mute

    failed, other = started(fails, fine)
    assert failed.trajectory.end == "env_error" and failed.trajectory.error.startswith("Mute: (it is unknown)")
    assert len(other.turns) == 1


def test_a_call_whose_arguments_are_text_ends_its_own_episode(started):
    def other_form():
        call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return SimpleNamespace(messages=[{"role": "user", "content": "q"}, said, {"role": "tool", "content": "1"}])

    failed, other = started(other_form, fine)
    assert failed.trajectory.end == "env_error" and "no JSON text" in failed.trajectory.error
    assert len(other.turns) == 1


def test_a_sample_without_a_turn_is_shown_and_written(started, tmp_path):
    def fails():
        raise ValueError("half a character: \ud800")

    samples = started(fails, fine)
    assert "half a character" in str(sample_panel("rollout 1", samples[0]).renderable)
    write(tmp_path / "file.parquet", records([samples]))
    first, second = pd.read_parquet(tmp_path / "file.parquet").to_dict("records")
    assert "half a character: ?" in first["env_error"] and (first["turns"], second["turns"]) == (0, 1)


def test_a_timeout_is_told_without_a_place_of_ours(started):
    release = threading.Event()
    failed, _ = started(lambda: release.wait(60), fine, timeout=0.5)
    release.set()
    assert (failed.trajectory.end, failed.trajectory.error) == (
        "env_timeout",
        "TimeoutError: it took longer than 0.5 s",
    )


def test_endless_limits_are_refused():
    with pytest.raises(UserError, match="step_timeout=inf"):
        Limits(step_timeout=math.inf)


@pytest.mark.parametrize(("by", "rounds"), [("correct", 3), ("reward", 1)])
def test_rewards_that_differ_among_wrong_answers_are_no_signal_for_dapo(parts, tmp_path, by, rounds):
    from grpo.extras.selection.selection import Dynamic

    numbers = iter(range(9))

    class Ranked(Starting):
        def score(self, example, trajectory):
            return Reward(float(next(numbers)), correct=False)

    size = ("rollout.prompts=1", "rollout.group_size=2")
    algorithm = preset("algo=dapo", *size)
    plan, sampler = Plan(1, 2, 1, Sampling(2)), Uniform([fine] * 4, 1, seed=0)
    settings = {"seed": 0, "selection": Dynamic(3, by)}
    rollout = Rollouts(plan, Ranked(), sampler, *parts, algorithm, str(tmp_path), **settings).make(0)
    assert (rollout.rounds, len(rollout.played)) == (rounds, rounds) and rollout.groups == rollout.played[:1]


def test_a_later_round_in_which_all_environments_fail_does_not_end_the_run(parts, tmp_path):
    from grpo.extras.selection.selection import Dynamic

    first_round = True

    def start():
        if first_round:
            return ASKED
        raise ConnectionError("gone")

    class Rounds(Starting):
        def score(self, example, trajectory):  # ends the first round: its rewards are equal, so a second round follows
            nonlocal first_round
            first_round = False
            return super().score(example, trajectory)

    size = ("rollout.prompts=1", "rollout.group_size=2")
    sampler = Uniform([start] * 4, 1, seed=0)
    algorithm = preset("algo=dapo", *size)
    plan = Plan(1, 2, 1, Sampling(2))
    rollouts = Rollouts(plan, Rounds(), sampler, *parts, algorithm, str(tmp_path), seed=0, selection=Dynamic(2))
    rollout = rollouts.make(0)
    groups, scored = rollout.played, rollout.all_scores
    assert rollout.rounds == 2 and [[sample.trajectory.failed for sample in group] for group in groups] == [
        [False] * 2,
        [True] * 2,
    ]
    assert scored.rewards.isnan().tolist() == [[False] * 2, [True] * 2]
    with pytest.raises(RolloutError, match="all 2 episodes"):
        rollouts.make(1)  # a first round, with no groups before it
