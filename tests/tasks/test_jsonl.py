"""Rows without a class: conversations in files, and rows that verl and open-instruct publish."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import compose_config
from helpers.episodes import said
from helpers.rows import write
from hydra.utils import instantiate

from grpo.env.messages import Message, ToolCall
from grpo.runs.run import Run
from grpo.system.errors import UserError
from tasks.jsonl import Jsonl, conversation
from train import train

QUIET = "callbacks=none forecast=false logger=csv preflight=warn eval.every=0".split()


def test_a_conversation_keeps_what_a_message_can_hold():
    """Calls with their arguments as an object or as text, answers in the order of the calls, parts of text, nulls."""
    parts = [{"type": "text", "text": "2 + 2?"}, {"type": "text", "text": "And 3?"}]
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in (("add", '{"a": 2}'), ("sub", {"b": [1, None]}))
    ]
    given = [
        {"role": "system", "content": "s", "name": None, "tool_calls": None},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Both."},
        *({"role": "tool", "content": name.upper(), "tool_call_id": name} for name in ("sub", "add")),
        {"role": "user", "content": "So?", "name": "Ada"},
    ]
    made = (ToolCall("add", {"a": 2}, "add"), ToolCall("sub", {"b": [1, None]}, "sub"))
    assert conversation(given) == (
        Message("system", "s"),
        Message("user", "2 + 2?\nAnd 3?"),
        Message("assistant", "<think>\nBoth.\n</think>\n\n", made),
        Message("tool", "ADD", name="add"),
        Message("tool", "SUB", name="sub"),
        Message("user", "So?", name="Ada"),
    )


REFUSED = [
    ([{"from": "human", "value": "1?"}], "neither a text nor a list of messages with role and content"),
    (7, "7 is neither a text nor a list of messages"),
    (["1?"], "neither a text nor a list"),
    ([{"role": "user", "content": "1?", "weight": 0}], "a message has the field 'weight', which no chat template gets"),
    ([{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}], "a part of type 'video'"),
    ([{"role": "user", "content": [{"text": "1?"}]}], "needs 'type'"),
    ([{"role": "user", "content": None}], "is no message: it needs a role"),
    ([{"role": "user", "content": 7}], "a message has the content 7: it needs a text, or a list"),
    ([{"role": "wizard", "content": "1?"}], "is no message: it needs a role"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}], "needs 'function'"),
    (
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
        "the JSON is broken",
    ),
]


@pytest.mark.parametrize(("prompt", "line"), REFUSED)
def test_a_prompt_that_cannot_be_asked_is_refused_by_row(tmp_path, prompt, line):
    good = [{"role": "user", "content": "1?"}] if isinstance(prompt, list) else "1?"
    path = write(tmp_path / "train.jsonl", [{"prompt": good}, {"prompt": prompt}])
    with pytest.raises(UserError, match=rf"train\.jsonl, line 2, column 'prompt': .*{re.escape(line)}") as refused:
        Jsonl(path, "longer", held_out={"test": 0.0}, splits={"train": "train"}).examples("train")
    assert "\n" not in str(refused.value)


def as_published(folder, name: str) -> None:
    """Write rows as verl's scripts prepare them, or as open-instruct publishes them."""
    for split, first in (("train", 0), ("test", 40)):
        rows = range(first, first + 20)
        asked = [[{"content": f"Ann has {i} pens and finds 2. How many pens has she?", "role": "user"}] for i in rows]
        if name == "verl":
            models = [{"ground_truth": str(i + 2), "style": "rule"} for i in rows]
            info = [{"answer": f"#### {i + 2}", "index": i, "split": split} for i in rows]
            more = {"data_source": ["openai/gsm8k"] * 20, "ability": ["math"] * 20, "extra_info": info}
            columns = {"prompt": asked, "reward_model": models, **more}
        else:
            asked = [[*one, {"content": "Four.", "role": "assistant"}] for one in asked]
            columns = {"messages": asked, "ground_truth": [[str(i + 2)] for i in rows], "dataset": [["gsm8k"]] * 20}
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("name", ["verl", "open_instruct"])
def test_published_rows_are_asked_and_graded_as_they_are(tmp_path, name):
    from grpo.extras.preflight.data import of_the_file

    as_published(tmp_path, name)
    task = instantiate(compose_config(f"task={name}", f"task.path={tmp_path}", "output_dir=.").task)
    rows = task.examples("train")
    assert len(rows) == len(task.examples("test")) == 20 and task.gold(rows[3]) == "5"
    (question,) = task.messages(rows[3])
    assert question == Message("user", "Ann has 3 pens and finds 2. How many pens has she?")
    assert task.score(rows[3], said("\\boxed{5}", question)).outcome == "right"
    assert of_the_file(task, rows[:4]) == (4, [])


@pytest.mark.slow
def test_published_rows_train(tmp_path):
    as_published(tmp_path, "verl")
    given = f"task=verl task.path={tmp_path} max_tokens=8 rollout.prompts=4 rollout.group_size=2 rollout.num_rollouts=1"
    train(compose_config(*given.split(), *QUIET, f"output_dir={tmp_path}/run"))
    found = Run(tmp_path / "run").manifest
    gold = found["preflight"]["gold answers are right"]
    assert found["status"] == "finished" and gold["result"] == "PASS"
    assert gold["compared"].startswith("8 right answers are as the file has them, 8 of 8 right answers are right")
