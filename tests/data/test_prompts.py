"""Prompts in their order, and those that are too long."""

import pytest
from conftest import EXAMPLES

from grpo.data.prompts import Uniform
from grpo.data.rows import at, head
from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.models.pretrained import Pretrained
from grpo.rollout.prompt_limit import PromptLimit
from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatches
from tasks.gsm8k import GSM8K


def test_a_pass_shows_every_example_once_and_the_tail_goes_to_the_next():
    sampler = Uniform(list("abcde"), size=2, seed=0)
    seen = [example for rollout in range(5) for example in sampler.draw(rollout, sampler.size)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list("abcde")
    assert seen[:5] != seen[5:]  # each pass in its own order
    assert [sampler.draw(r, sampler.size) for r in range(5)] != [Uniform("abcde", 2, 1).draw(r, 2) for r in range(5)]


def test_further_prompts_of_a_rollout_are_all_others_in_an_order_of_its_own():
    sampler = Uniform(list("abcdefgh"), size=2, seed=0)
    drawn = [sampler.draw(r, 2) + sampler.draw(r, 6, first=2) for r in range(3)]
    assert all(sorted(one) == list("abcdefgh") for one in drawn)
    assert sampler.draw(0, 2, first=2) == drawn[0][2:4]  # no more than a pass has for the rollout
    common = {*"abcdefgh"}.difference(*(one[:2] for one in drawn))
    assert len({tuple(x for x in one if x in common) for one in drawn}) > 1
    assert sampler.progress(3) == {"data/prompts": 6.0, "data/epoch": 0.75}


def test_resuming_is_starting_later():
    batches = RolloutBatches()
    batches.start = 4
    assert [batch.rollout for _, batch in zip(range(2), batches, strict=False)] == [4, 5]


def test_more_prompts_than_examples_is_refused():
    with pytest.raises(UserError, match=r"rollout\.prompts=9 is more than the 2"):
        Uniform(["a", "b"], 9, seed=0)


def test_long_prompts_are_refused_dropped_or_cut_from_the_left(toy, caplog):
    caplog.set_level("INFO")
    task, tokenizer = GSM8K(str(EXAMPLES)), Pretrained(str(toy)).tokenizer()
    renderer = TemplateRenderer(tokenizer)
    lengths = [len(renderer.prompt_ids(task.build(e).start().messages)) for e in task.examples("train")]
    longest = max(lengths)
    assert PromptLimit().within(longest + 8, 8).fitting(task, "train", renderer) == task.examples("train")
    with pytest.raises(UserError, match=f"train example {lengths.index(longest) + 1} has {longest} tokens"):
        PromptLimit().within(longest + 7, 8).fitting(task, "train", renderer)

    with pytest.raises(
        UserError, match=f"example {lengths.index(longest) + 1} has {longest} tokens"
    ):  # a limit holds for all
        PromptLimit(longest - 1).within(4096, 8).fitting(task, "train", renderer, most=0)
    assert PromptLimit().within(longest + 7, 8).fitting(task, "train", renderer, most=0)  # the engine sees to it

    assert PromptLimit(longest, "drop").within(4096, 8).fitting(task, "train", renderer) == task.examples("train")
    limit = PromptLimit(longest - 1, "drop").within(4096, 8)
    kept = limit.fitting(task, "train", renderer)
    assert [row["question"] for row in kept] == [
        row["question"] for row, n in zip(task.examples("train"), lengths, strict=True) if n < longest
    ]
    assert f"1 of 4 prompts are longer than {longest - 1} tokens and left out" in caplog.text
    with pytest.raises(UserError, match="removes all 4 examples of the split 'train'; the longest has"):
        PromptLimit(1, "drop").within(4096, 8).fitting(task, "train", renderer)

    limit = PromptLimit(5, "truncate").within(4096, 8)
    assert limit.fitting(task, "train", renderer) == task.examples("train")
    messages = [Message("user", "one two three four five six seven")]
    whole = renderer.prompt_ids(messages)
    assert TemplateRenderer(tokenizer, limit.kept).prompt_ids(messages) == whole[-5:]
    with pytest.raises(UserError, match="is not one of refuse, drop, truncate"):
        PromptLimit(too_long="cut")
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        PromptLimit().within(8, 8)


def test_a_dotted_name_is_a_column_or_a_place_in_one():
    row = {"a.b": 1, "a": {"b": 2, "c": 3}}
    assert [head(name, row) for name in ("a.b", "a.c", "d.e")] == ["a.b", "a", "d"]
    assert [at(row, name) for name in ("a.b", "a.c", "d.e")] == [1, 3, None]
