"""The tasks with pictures of the hub, on files of the same form: questions, pictures, right answers and rewards."""

import pytest
from conftest import compose_config
from helpers.seeing import drawn
from hydra.utils import instantiate

from grpo.env.messages import Message
from grpo.env.pictures import MARK
from grpo.env.types import Action, State, Step, Trajectory

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
FILES = [drawn(28 + 14 * i, 28, i).data for i in range(40)]


def hub(folder, column: str, rows: list[dict], split: str, first: int = 0) -> None:
    """Write a split as the hub stores pictures: bytes and a path. first: of FILES."""
    pictures = [{"bytes": FILES[first + i], "path": f"{i}.png"} for i in range(len(rows))]
    values = [{**row, column: [p] if column == "images" else p} for row, p in zip(rows, pictures, strict=True)]
    pq.write_table(pa.Table.from_pylist(values), folder / f"{split}.parquet")


def answered(task, row, text: str) -> float:
    """Return the reward of an answer."""
    return task.score(row, Trajectory((Step(State(task.messages(row)), Action(Message("assistant", text))),))).value


def test_geometry3k(tmp_path):
    """One question about many drawings: rows that differ in the drawing alone are kept, and their mark is its place."""
    rows = [{"problem": f"{MARK}Find $x$.", "answer": f"{i}\\sqrt{{2}}"} for i in range(3)]
    for split, count, first in (("train", 3, 0), ("validation", 1, 3), ("test", 2, 4)):
        hub(tmp_path, "images", rows[:count], split, first)
    task = instantiate(compose_config("task=geometry3k", f"task.path={tmp_path}", "output_dir=.").task)
    found = task.examples("train")
    assert [len(found), len(task.examples("test")), len(task.examples("validation"))] == [3, 2, 1]
    [message] = task.build(found[1]).messages
    assert message.content == f"{MARK}Find $x$.\n\nReason step by step, and put the final answer in \\boxed{{}}."
    assert [picture.data for picture in message.pictures] == [FILES[1]]
    assert answered(task, found[1], "It is \\boxed{\\sqrt{2}}") == pytest.approx(1.1)  # 0.1 of them for the box
    assert answered(task, found[2], "It is \\boxed{\\sqrt{2}}") == pytest.approx(0.1)


def test_clevr_count(tmp_path):
    """The one split has rows held out by question and picture; an answer in tags is right as a number."""
    question = "How many different items are there in the image?"
    hub(tmp_path, "image", [{"problem": question, "solution": f"<answer> {i} </answer>"} for i in range(40)], "train")
    chosen = ["task=clevr_count", f"task.path={tmp_path}", "task.held_out.test=0.25", "output_dir=."]
    task = instantiate(compose_config(*chosen).task)
    train, test = task.examples("train"), task.examples("test")
    assert len(train) + len(test) == 40 and 4 <= len(test) <= 16
    [message] = task.build(train[0]).messages
    assert message.content == f"{MARK}{question} Put the final answer in \\boxed{{}}."
    number = FILES.index(message.pictures[0].data)
    assert answered(task, train[0], f"\\boxed{{{number}}}") == pytest.approx(1.1)
    assert answered(task, train[0], f"\\boxed{{{number + 1}}}") == pytest.approx(0.1)
