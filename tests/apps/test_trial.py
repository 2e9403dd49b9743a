"""The trial of a user's environment and score on a made-up episode."""

import logging

import pytest
from conftest import EXAMPLES

from grpo.apps.trial import try_task
from grpo.env.messages import Message
from grpo.env.types import Reward, SingleTurn
from grpo.system.errors import UserError
from tasks.jsonl import Jsonl

MINE = """
class Game:
    def reset(self, **row): return None
    def get_reward(self): return 1.0
class Strange(Game):
    def reset(self, colour, **row): return None
class Broken(Game):
    def get_reward(self): raise OSError("no server")
def fair(completions, environments, **columns):
    return [float(type(env.inner).__name__ == "Game" and len(messages)) for messages, env in zip(completions, environments)]
def of_texts(completions, **columns):
    return [float(len(text.split())) for text in completions]
"""


@pytest.fixture
def task(tmp_path):
    (tmp_path / "games.py").write_text(MINE)

    def make(environment: str, rewards: str) -> Jsonl:
        rewards = rewards if rewards == "environment" else f"{tmp_path}/games.py:{rewards}"
        file, more = str(EXAMPLES / "train.jsonl"), {"held_out": {"test": 0.1}}
        return Jsonl(file, rewards, prompt="question", environment=f"{tmp_path}/games.py:{environment}", **more)

    return make


def tried(task) -> str:
    with pytest.raises(UserError) as refusal:
        try_task(task, {"train": (task, "train")})
    return str(refusal.value)


def test_an_environment_that_does_not_start_is_refused(task):
    line = tried(task("Strange", "environment"))
    assert line.startswith("an environment of Jsonl fails at its start: TypeError: Strange.reset() missing 1 required")


def test_a_reward_of_an_environment_s_episodes_gets_lists_of_messages(task):
    line = tried(task("Game", "of_texts"))
    assert "raised AttributeError: 'list' object has no attribute 'split'" in line
    assert "completions are lists of messages, because episodes may have several turns" in line
    good = task("Game", "fair")
    try_task(good, {"train": (good, "train")})


def test_an_environment_that_fails_later_is_a_warning(task, caplog):
    broken = task("Broken", "environment")
    try_task(broken, {"train": (broken, "train")})
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith("an environment of Jsonl raised OSError: no server")


class Own:
    """A task of a user's own, whose score has a state."""

    def __init__(self) -> None:
        self.calls, self.built = 0, 0

    def examples(self, split):
        return [{"number": 1}]

    def build(self, example):
        self.built += 1
        return SingleTurn((Message("user", "1?"),))

    def score(self, example, trajectory):
        self.calls += 1
        return Reward(float(trajectory.answer["text"]), True)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Right(Own):
    def score(self, example, trajectory):
        self.calls += 1
        return Reward(float(len(trajectory.answer)), True)


def test_a_score_of_one_s_own_is_tried_and_its_state_put_back():
    line = tried(Own())
    assert line.startswith("Own.score raised TypeError: string indices must be integers")
    assert "(tried with a made-up answer; trajectory.answer is the text of the last message" in line
    task = Right()
    try_task(task, {"train": (task, "train")})
    assert (task.built, task.calls) == (1, 0)


def test_a_run_that_samples_of_others_teach_is_not_tried():
    task = Own()
    try_task(task, {"test": (task, "test")})
    assert task.built == 0
