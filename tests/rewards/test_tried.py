"""A reward function of the user's scores made-up answers when the rows are loaded: before a model is."""

import json
import threading

import pytest
from helpers.episodes import said

from grpo.rewards import combined
from grpo.system.errors import UserError
from tasks.jsonl import Jsonl

CALLS: list[dict] = []


def for_texts(completions, **columns):
    CALLS.append({"completions": completions} | columns)
    return [float(len(completion.strip())) for completion in completions]


def for_messages(completions, gold, completion_ids):
    return [float(completion[-1]["content"] == gold) for completion in completions]


def forgets_one(completions, **columns):
    return [0.0]


def hangs(completions, **columns):
    threading.Event().wait()


def rows(folder, prompt, **more) -> Jsonl:
    """A task with two rows."""
    lines = [{"prompt": prompt(i), "answer": str(i)} for i in range(2)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Jsonl(str(folder / "rows.jsonl"), held_out={}, splits={"train": "train"}, gold="answer", **more)


def as_text(i: int) -> str:
    return f"number {i}"


def as_messages(i: int) -> list[dict]:
    return [{"role": "user", "content": f"number {i}"}]


def test_a_function_for_texts_and_one_for_messages(tmp_path):
    CALLS.clear()
    rows(tmp_path, as_text, rewards=[for_texts]).examples("train")
    (call,) = CALLS
    assert call["completions"] == ["I think it is 42."] * 2 and call["answer"] == call["gold"] == ["0", "0"]
    assert call["prompts"] == ["number 0"] * 2
    rows(tmp_path, as_messages, rewards=[for_messages]).examples("train")


def test_the_line_names_the_form(tmp_path):
    with pytest.raises(
        UserError, match=r"'for_texts' raised AttributeError: 'list' .*strip.* are lists of messages, because"
    ):
        rows(tmp_path, as_messages, rewards=[for_texts]).examples("train")
    with pytest.raises(UserError, match=r"'for_messages' raised TypeError: .* completions are texts"):
        rows(tmp_path, as_text, rewards=[for_messages]).examples("train")
    with pytest.raises(UserError, match="'forgets_one' gave 1 value for 2 completions"):
        rows(tmp_path, as_text, rewards=["last_number", forgets_one]).examples("train")


class Running:
    """Compares with the longest completion that it has seen."""

    longest = 0

    def __call__(self, completions, **columns):
        self.longest = max(self.longest, *map(len, completions))
        return [float(len(completion) == self.longest) for completion in completions]

    def state_dict(self):
        return {"longest": self.longest}

    def load_state_dict(self, state):
        self.longest = state["longest"]


def test_a_function_forgets_the_made_up_answers(tmp_path):
    function = Running()
    task = rows(tmp_path, as_text, rewards=[function])
    row = task.examples("train")[0]
    assert function.longest == 0 and task.score(row, said("four")).value == 1.0


def test_one_that_hangs_does_not_hold_the_run_up(tmp_path, monkeypatch):
    monkeypatch.setattr(combined, "PATIENCE", 0.05)
    rows(tmp_path, as_text, rewards=[hangs]).examples("train")


def test_each_function_is_tried_once_and_ours_is_not(tmp_path, monkeypatch):
    CALLS.clear()
    task = rows(tmp_path, as_text, rewards=[for_texts])
    task.examples("train"), task.examples("train")
    assert len(CALLS) == 1
    monkeypatch.setattr("grpo.rewards.combined.Rewards.score", lambda *_: pytest.fail("ours are not tried"))
    assert rows(tmp_path, as_text, rewards=["correct"]).examples("train")
