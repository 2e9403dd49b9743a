"""Sums for a small instruct model: rows, splits, prompts, and the last number as the answer."""

from pathlib import Path

import pytest
from helpers.episodes import said
from helpers.families import FAMILIES

from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action, Step, Trajectory
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.system.errors import UserError
from tasks.sums import CalledSums, Sums


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
    from grpo.extras.grading.functions import last_number

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


def test_a_calculator_is_shown_in_the_examples_and_can_be_called():
    """By hand: the policy calls for 62 * 49, reads 3038 and says it. A call that is the last message is no answer."""
    task = CalledSums(shots=1)
    row = {"left": 62, "sign": "*", "right": 49, "answer": 3038}
    call = ToolCall("calculator", {"expression": "62 * 49"})
    env = task.build(row)
    start = env.start()
    asked, called, result, answer, question = start.messages
    assert called.tool_calls == (ToolCall("calculator", {"expression": "12 * 17"}),) and result.content == "204"
    assert (asked.content, answer.content) == ("What is 12 * 17?", "12 * 17 = 204")
    assert question.content == "What is 62 * 49?" and [tool.name for tool in start.tools] == ["calculator"]
    after = env.step(Action(Message("assistant", "", (call,))))
    assert after.messages[-1].content == "3038"
    assert task.score(row, said("62 * 49 = 3038")).value == 1
    unfinished = Trajectory((Step(after, Action(Message("assistant", "3038"))),), "out_of_turns")
    assert task.score(row, unfinished).value == 0
    assert {row["sign"] for row in task.examples("train")} == {"+", "-", "*"}


def test_the_template_with_tools_is_read_as_it_writes():
    """ChatML, with the call that `hermes` reads; the messages after a call continue the tokens before them."""
    from grpo.extras.demo.smollm2 import tool_template

    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template = Path(tool_template()).read_text()
    start = CalledSums(shots=1).build({"left": 62, "sign": "*", "right": 49, "answer": 3038}).start()
    text = tokenizer.decode(TokenizerRenderer(tokenizer).prompt_ids(start.messages, start.tools))
    assert text.startswith("<|im_start|>system\nYou have tools: calculator(expression).")
    assert '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 17"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>user\nWhat is 62 * 49?<|im_end|>\n<|im_start|>assistant\n")
    assert TokenizerRenderer(tokenizer).form == "hermes"
