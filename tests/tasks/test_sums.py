"""Sums for a small instruct model: rows, splits, prompts, and the last number as the answer."""

import pytest
from helpers.episodes import said

from grpo.env.messages import Message
from grpo.rewards.functions import last_number
from grpo.system.errors import UserError
from tasks.sums import Sums


def test_questions_are_those_of_the_seed_and_the_splits_share_none():
    rows = {split: [*Sums(train_size=400, test_size=100).examples(split)] for split in ("train", "test")}
    assert all(row["answer"] == eval(f"{row['left']}{row['sign']}{row['right']}") >= 0 for row in rows["train"])
    asked = {split: {(row["left"], row["sign"], row["right"]) for row in rows[split]} for split in rows}
    assert len(asked["train"]) == 400 and len(asked["test"]) == 100  # each question once
    assert not asked["train"] & asked["test"] and {sign for _, sign, _ in asked["train"]} == {"+", "-"}
    assert max(row["left"] for row in rows["train"]) == 60 and min(row["right"] for row in rows["train"]) == 2
    assert (
        rows["train"] == [*Sums(train_size=400).examples("train")] != [*Sums(train_size=400, seed=1).examples("train")]
    )
    with pytest.raises(UserError, match="no split 'validation': train, test"):
        Sums().examples("validation")
    every = [len(Sums().questions(split)) for split in ("train", "test")]
    assert sum(every) == 2 * 59 * 60 / 2 and 0.18 < every[1] / sum(every) < 0.22
    with pytest.raises(
        UserError, match=f"task.test_size=2000 is more than the {every[1]} questions with task.largest=60"
    ):
        Sums(test_size=2000).examples("test")


def test_the_model_reads_worked_examples_and_its_last_number_counts():
    task = Sums(shots=1)
    row = {"left": 56, "sign": "-", "right": 26, "answer": 30}
    worked = (Message("user", "What is 12 + 7?"), Message("assistant", "12 + 7 = 19"))
    assert task.messages(row) == (*worked, Message("user", "What is 56 - 26?"))
    texts = [
        "56 - 26 = 30",
        "56 - 26 = 30.",
        "It is 30.0",
        "30? No: 31",
        "<think>31</think>30",
        "thirty",
        "-30",
        "56-30",
    ]
    got = [task.score(row, said(text)) for text in texts]
    assert [reward.value for reward in got] == [1, 1, 1, 0, 1, 0, 0, 0]
    assert got[5].outcome == "no_answer"
    assert [r.value for r in last_number(["1,024", "3/4"], ["1024", 4], wrong=-1)] == [1, 1]
