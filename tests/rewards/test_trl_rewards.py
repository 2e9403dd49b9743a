"""Reward functions and rows in TRL's forms go into task=jsonl as they are."""

import asyncio
import json
from functools import partial

import pytest
from helpers.episodes import said

from grpo.env.messages import Message
from tasks.jsonl import Jsonl

shipped = pytest.importorskip("trl.rewards")

ASKED = "What is 2 + 2?"
CHAT = {"prompt": [{"role": "user", "content": ASKED}], "solution": "$4$", "kind": "sum"}
TEXT = {"prompt": ASKED, "solution": "$4$", "kind": "sum"}
RIGHT, WRONG = r"<think>two and two</think>It is \boxed{4}.", r"It is \boxed{5}."


def task(tmp_path, row, *rewards, weights=None):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return Jsonl(str(tmp_path / "rows.jsonl"), list(rewards), weights, splits={"train": "train"})


def values(tmp_path, row, *rewards, lengths=(9, 20), weights=None):
    """Return the rewards of RIGHT and WRONG, which are `lengths` tokens long, after a prompt in the row's form."""
    built = task(tmp_path, row, *rewards, weights=weights)
    answers = [said(text, *built.messages(row), length=n) for text, n in zip((RIGHT, WRONG), lengths, strict=True)]
    return [reward.value for reward in built.score_group(built.examples("train")[0], answers)]


def test_the_functions_that_trl_ships(tmp_path):
    assert values(tmp_path, CHAT, shipped.accuracy_reward) == [1.0, 0.0]
    assert values(tmp_path, CHAT, "trl.rewards.think_format_reward") == [1.0, 0.0]
    assert values(tmp_path, CHAT, shipped.reasoning_accuracy_reward) == [1.0, 0.0]
    assert values(tmp_path, CHAT, shipped.accuracy_reward, shipped.think_format_reward, weights=[1, 0.5]) == [1.5, 0.0]
    # of 20 tokens the last 8 are punished: none of 9, 12 - 16 = -4 of 8, and all beyond 20
    overlong = shipped.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    assert values(tmp_path, CHAT, overlong) == [0.0, -1.0]
    assert values(tmp_path, CHAT, overlong, lengths=(16, 21)) == [-0.5, -1.0]
    # the tokens are 0, 1, 2, ...: no n-gram comes twice
    assert values(tmp_path, CHAT, shipped.get_repetition_penalty_reward()) == [0.0, 0.0]
    # a long right answer earns 0.5 rather than 1, and a long wrong one -0.5 rather than -1; half way it is the middle
    cosine = shipped.get_cosine_scaled_reward(max_len=20)
    assert values(tmp_path, CHAT, cosine, lengths=(20, 20)) == pytest.approx([0.5, -0.5])
    assert values(tmp_path, CHAT, cosine, lengths=(10, 10)) == pytest.approx([0.75, -0.75])


def test_a_gold_answer_that_nobody_can_read_has_no_reward(tmp_path):
    first, second = values(tmp_path, {**CHAT, "solution": ""}, shipped.accuracy_reward)
    assert first != first and second != second  # NaN


def test_the_forms_of_functions(tmp_path):
    """A text has a text as its completion, and a conversation a list of one message. Columns come by their names."""

    def near_20(completions, **kwargs):
        return [-abs(20 - len(text)) for text in completions]

    def of_messages(prompts, completions, **kwargs):
        assert prompts[0] == CHAT["prompt"] and completions[0][0]["role"] == "assistant"
        return [float("boxed{4}" in message[0]["content"]) for message in completions]

    def by_column(completions, solution, **kwargs):
        return [float(gold.strip("$") in text) for text, gold in zip(completions, solution, strict=True)]

    async def waits(completion_ids, **kwargs):
        await asyncio.sleep(0)
        return [float(len(ids)) for ids in completion_ids]

    def of_sums(completions, kind, **kwargs):
        return [1.0 if one == "sum" else None for one in kind]

    def of_code(completions, kind, **kwargs):
        return [5.0 if one == "code" else None for one in kind]

    class Called:
        def __init__(self, bonus):
            self.bonus = bonus

        def __call__(self, completions, **kwargs):
            return [self.bonus] * len(completions)

    assert values(tmp_path, TEXT, near_20) == [-abs(20 - len(RIGHT)), -abs(20 - len(WRONG))]
    assert values(tmp_path, CHAT, of_messages) == [1.0, 0.0]
    assert values(tmp_path, TEXT, by_column) == [1.0, 0.0]
    assert values(tmp_path, TEXT, waits) == [9.0, 20.0]
    assert values(tmp_path, TEXT, of_sums, of_code) == [1.0, 1.0]
    assert values(tmp_path, TEXT, waits, by_column, weights=[0.1, 2]) == [pytest.approx(2.9), 2.0]
    assert values(tmp_path, TEXT, Called(0.5), partial(near_20, unused=1)) == [0.5 - 22, 0.5 - 4]


def test_the_forms_of_prompts(tmp_path):
    assert task(tmp_path, TEXT, "environment").messages(TEXT) == (Message("user", ASKED),)
    system = {"role": "system", "content": "Be brief."}
    longer = {**CHAT, "prompt": [system, *CHAT["prompt"]]}
    assert task(tmp_path, longer, "environment").messages(longer) == (
        Message("system", "Be brief."),
        Message("user", ASKED),
    )
