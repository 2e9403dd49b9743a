"""The calculator and its task: exact results, one clear line for errors, episodes scored by hand, correct dialogues."""

import json
import random
import re

import pytest
from helpers.episodes import played

from grpo.env.messages import Message, ToolCall
from grpo.extras.tools.renderer import TokenizerRenderer
from tasks.calculator import LARGEST, Calculator, calculator, conversation, worked_answers
from tasks.wordmath import Problem, draw, side

# 214 things, 13 bags of 42 more, 60 lost
PROBLEM = Problem("?", start=214, sums=(("+", 13, 42), ("-", 60, None)))


def call(expression: str) -> Message:
    return Message("assistant", "", (ToolCall("calculator", {"expression": expression}),))


def box(number: object) -> Message:
    return Message("assistant", f"\\boxed{{{number}}}")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("13*42", "546"), ("214 + 546", "760"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("7/2", "7/2"), ("84/4", "21"),
        ("3-5", "-2"), ("-2+10", "8"), ("0.1+0.2", "3/10"), ("1/3*3", "1"), ("9999*9999", "99980001"),
    ],
)  # fmt: skip
def test_the_tool_is_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["", *"1+ (1 1) 1/0 1/(2-2) 2**9 2^9 5! a+1 1=1".split(), "1 2", "1e9", "__import__('os')", "9" * 201],
)
def test_anything_else_is_told_in_one_line(expression):
    from grpo.extras.tools.env import ToolError

    with pytest.raises(ToolError, match="has no value: give numbers with") as error:
        calculator(expression)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_dialogue_by_hand():
    said = conversation(PROBLEM, random.Random(0))
    assert said.messages == (
        Message("user", "?"), call("13*42"), Message("tool", "546", name="calculator"), call("214+546"),
        Message("tool", "760", name="calculator"), call("760-60"), Message("tool", "700", name="calculator"),
        box(700),
    )  # fmt: skip
    (spec,) = said.tools
    assert spec.name == "calculator" and spec.parameters["required"] == ["expression"]


def test_the_hastiest_author_calls_nothing_and_one_who_slips_misreads():
    from grpo.extras.demo.demo_model import texts

    assert conversation(PROBLEM, random.Random(0), hasty=1.0).messages == (Message("user", "?"), box(214))
    (said,) = texts([conversation(PROBLEM, random.Random(0), slips=1.0)])
    numbers = [re.findall(r"\d+", text) for text in said[1:]]
    assert numbers[0] == ["13", "42"] and numbers[1] == ["546"]  # the tool is correct
    assert numbers[2][0] == "214" and numbers[2][1] != "546"
    assert numbers[-1] != numbers[-2]  # the box, and the tool's last result


def test_the_worked_dialogues_rendered_and_read_back_give_the_answer():
    """Each rendered dialogue is replayed by hand: the tool's results are correct and lead to the box."""
    from grpo.extras.demo.demo_model import make_tokenizer, texts

    said = worked_answers(300, seed=0)
    tokenizer = make_tokenizer([text for messages in texts(said) for text in messages], tools=True)
    lengths = set()
    for one in said:
        rendered = tokenizer.apply_chat_template(
            [message.as_dict() for message in one.messages],
            tools=[tool.as_dict() for tool in one.tools],
            tokenize=False,
        )
        assert tokenizer.decode(tokenizer(rendered, add_special_tokens=False).input_ids) == rendered
        told, *turns = rendered.split("<|assistant|>")
        assert told == f"<|system|>calculator(expression)<|end|><|user|>{one.messages[0].content}<|end|>"
        *calls, last = turns
        known = set(re.findall(r"\d+", told))
        for turn in calls:
            written, reply = re.fullmatch(
                r"<tool_call>\n(.*)\n</tool_call><\|end\|><\|tool\|>(\d+)<\|end\|>", turn
            ).groups()
            request = json.loads(written)
            expression = request["arguments"]["expression"]
            assert request == {"name": "calculator", "arguments": {"expression": expression}}
            assert set(re.findall(r"\d+", expression)) <= known  # every number is in the question or a result
            assert eval(expression) == int(reply) <= LARGEST
            known.add(reply)
        assert last == f"\\boxed{{{reply}}}<|end|>"
        lengths.add(len(calls))
    assert lengths == {2, 3}


def test_the_renderer_reads_a_dialogue_as_it_was_and_every_prompt_goes_on_from_the_last():
    from grpo.extras.demo.demo_model import make_tokenizer, texts

    said = worked_answers(50, seed=0)
    renderer = TokenizerRenderer(make_tokenizer([text for one in texts(said) for text in one], tools=True))
    for one in said:
        before = ()
        for place, message in enumerate(one.messages):
            if message.role == "assistant":
                prompt = renderer.prompt_ids(one.messages[:place], one.tools, before)
                whole = renderer.prompt_ids([*one.messages[: place + 1], Message("user", "")], one.tools)
                assert prompt[: len(before)] == before and whole[: len(prompt)] == prompt
                end = whole.index(renderer.tokenizer.eos_token_id, len(prompt)) + 1
                assert renderer.parse(whole[len(prompt) : end], one.tools) == message
                before = whole[:end]


def test_following_the_working_is_right_on_every_row():
    task = Calculator(train_size=300, test_size=100)
    calls = 0
    for row in [*task.examples("train"), *task.examples("test")]:
        lines = row["solution"].split("\n")[:-1]
        trajectory = played(
            Calculator().build(row), *(call(line.partition("=")[0]) for line in lines), box(row["answer"])
        )
        replies = [message for message in trajectory.messages if message.role == "tool"]
        assert [message.content for message in replies] == [line.partition("=")[2] for line in lines]
        reward = task.score(row, trajectory)
        assert (reward.value, reward.correct) == (1.0, True)
        calls += len(lines)
    assert 2.3 < calls / 400 < 2.7  # 2 and 3 are equally frequent


ROW = {"question": "?", "answer": "700", "steps": 3, "solution": ""}


@pytest.mark.parametrize(
    ("said", "most", "value"),
    [
        ([box(700)], 9, 1.0),  # a call is not needed
        ([box(214)], 9, 0.0),
        ([call("13*42"), call("1/0"), box(700)], 9, 1.0),  # and may fail
        ([call("13*42"), box(546)], 9, 0.0),
        ([Message("assistant", "\\boxed{700}", call("1+1").tool_calls), box(1)], 9, 0.0),  # the last message counts
        ([call("1+1")] * 3, 2, 0.0),
        (
            [call("1+1"), Message("assistant", "\\boxed{700}", call("1+1").tool_calls)],
            2,
            0.0,
        ),  # out of turns: no answer
    ],
)
def test_episodes_scored_by_hand(said, most, value):
    reward = Calculator().score(ROW, played(Calculator().build(ROW), *said, most=most))
    assert (reward.value, reward.correct) == (value, value == 1.0)


def test_out_of_turns_is_no_answer():
    trajectory = played(Calculator().build(ROW), call("1+1"), call("1+1"), most=2)
    assert trajectory.end == "out_of_turns" and Calculator().score(ROW, trajectory).outcome == "no_answer"


def test_the_siblings_of_a_group_may_differ_in_turns():
    rewards = Calculator().score_group(
        ROW, [played(Calculator().build(ROW), box(700)), played(Calculator().build(ROW), call("1+1"), box(2))]
    )
    assert [reward.value for reward in rewards] == [1.0, 0.0]


def test_the_policy_is_told_of_the_tool():
    row = Calculator().examples("test")[0]
    state = Calculator().build(row).start()
    assert state.messages == (Message("user", row["question"]),)
    assert [tool.name for tool in state.tools] == ["calculator"]


def test_numbers_are_larger_and_no_larger_than_asked():
    def numbers(largest: int) -> list[int]:
        rng = random.Random(0)
        return [int(n) for _ in range(300) for n in re.findall(r"\d+", draw(rng, 3, largest).worked(rng)[0])]

    assert max(numbers(99)) <= 99 and 5000 < max(numbers(9999)) <= 9999
    answers = [int(row["answer"]) for row in Calculator(train_size=300).examples("train")]
    assert sum(answer > 99 for answer in answers) > 250


def test_the_warm_start_is_of_the_train_side():
    said = worked_answers(1000, seed=0)
    assert {side(one.messages[0].content) for one in said} == {"train"}
    test = {row["question"] for row in Calculator().examples("test")}
    assert len(test) == 500 and {side(question) for question in test} == {"test"}


def test_hasty_dialogues_are_shorter():
    clean, hasty = (
        sum(len(one.messages) // 2 - 1 for one in worked_answers(1000, 0, hasty=share)) for share in (0.0, 0.5)
    )
    assert 2400 < clean < 2600 and 600 < hasty < 950  # 1/2 + 1/4 + sometimes 1/8
