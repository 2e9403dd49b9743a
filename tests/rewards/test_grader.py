"""The grader of the book, and what a task asks of the grader of its rewards."""

import pytest

from grpo.env.messages import Message
from grpo.env.types import Action, Claim, State, Step, Trajectory
from grpo.rewards.basic import same_text
from tasks.jsonl import Jsonl


def episode(text):
    return Trajectory((Step(State((Message("user", "?"),)), Action(Message("assistant", text))),))


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "Which tree?", "gold": "an old  oak"}\n')
    return str(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("text", "claimed", "outcome"),
    [
        ("#### an old oak", "an old oak", "right"),
        ("#### a birch\n#### an old\toak \nIndeed.", "an old\toak", "right"),  # the last one
        ("<think>#### a birch</think>#### an old oak", "an old oak", "right"),
        ("#### a birch", "a birch", "wrong"),
        ("an old oak", None, "no_answer"),
        ("####", None, "no_answer"),
    ],
)
def test_the_text_after_the_last_marker(text, claimed, outcome):
    (reward,) = same_text([text], ["an old  oak"], wrong=-1)
    assert same_text.grader.claimed(text) == claimed
    assert (reward.value, reward.correct, reward.outcome) == (
        1 if outcome == "right" else -1,
        outcome == "right",
        outcome,
    )


def test_a_right_answer_that_is_unknown_gives_no_reward():
    assert not same_text(["#### 1"], [None])[0].known


def test_a_task_asks_the_grader_of_its_rewards(rows, caplog):
    """Any function may have one; without one nothing is claimed, and no right answer is looked at."""

    class Shouts:
        claimed = found = staticmethod(str.upper)

        def verdict(self, answer, gold):
            return "right" if answer == gold.upper() else "wrong"

        def unreadable(self, golds):
            return [place for place, gold in enumerate(golds) if gold]

    def loud(completions, gold, **columns):
        return [1.0] * len(completions)

    task = Jsonl(rows, ["same_text"], gold="gold", splits={"train": "train"})
    (row,) = task.examples("train")
    assert task.claims(row, episode("#### an old oak")) == Claim("an old oak", True)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    task = Jsonl(rows, [loud], gold="gold", splits={"train": "train"})
    assert task.grader is None and task.claims(row, episode("an old oak")) is None
    loud.grader = Shouts()
    assert task.claims(row, episode("a birch")) == Claim("A BIRCH", False)
    task.examples("train")
    assert "1 right answers cannot be read" in caplog.text
