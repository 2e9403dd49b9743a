"""Prompts in their order, rows and what is wrong with them, GSM8K, grading."""

import json
from fractions import Fraction
from itertools import pairwise

import pytest
from conftest import EXAMPLES, REAL_DATA

from grpo.data import PromptLoader, check_prompts
from grpo.errors import UserError
from grpo.grading import extract_answer, is_correct
from grpo.messages import Message
from grpo.policy import Pretrained
from grpo.renderer import TokenizerRenderer
from grpo.rl import Action, State, Step, Trajectory
from grpo.rows import read_rows
from tasks.gsm8k import GSM8K


def test_a_pass_shows_every_example_once_and_the_tail_goes_to_the_next():
    loader = PromptLoader(list("abcde"), size=2, seed=0)
    seen = [example for rollout in range(5) for example in loader.batch(rollout).examples]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list("abcde")
    assert seen[:5] != seen[5:]  # each pass in its own order
    assert [loader.batch(r).examples for r in range(5)] != [
        PromptLoader("abcde", 2, 1).batch(r).examples for r in range(5)
    ]


def test_resuming_is_starting_later():
    loader = PromptLoader(list("abcdefg"), size=3, seed=4)
    stream = iter(loader)
    straight = [next(stream).examples for _ in range(6)]
    loader.start = 4
    assert [batch.examples for _, batch in zip(range(2), loader, strict=False)] == straight[4:]


def test_more_prompts_than_examples_is_refused():
    with pytest.raises(UserError, match=r"rollout\.prompts=9 is more than the 2"):
        PromptLoader(["a", "b"], 9, seed=0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", "", "is empty"),
        ("train.jsonl", '{"question": "q"}\n', "row 1: no field 'answer'; it has question"),
        ("train.jsonl", '{"question": "q", "answer": "1"}\n{"question": "q"}\n', "row 2: no field 'answer'"),
        ("train.jsonl", '{"question": "q", "answer"\n', "could not be read"),
        ("train.txt", "x", "no files for the split 'train'"),
        ("other.jsonl", "{}", "no files for the split 'train'"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_rows(str(tmp_path), "train", "gsm8k", ("question", "answer"))
    assert "\n" not in str(error.value)


def test_bad_paths_are_named(tmp_path):
    for path in (str(tmp_path / "missing"), "./missing", "missing"):
        with pytest.raises(UserError, match="does not exist"):
            read_rows(path, "train", "gsm8k", ("question",))
    (tmp_path / "a_train.csv").write_text("question\nq\n")
    (tmp_path / "b_train.csv").write_text("question\nq\n")
    with pytest.raises(UserError, match="no files for the split"):
        read_rows(str(tmp_path), "train", "gsm8k", ("question",))
    (tmp_path / "my_gsm8k_train.csv").write_text("question\nours\n")  # of several the one that has the task's name
    assert read_rows(str(tmp_path), "train", "gsm8k", ("question",))[0]["question"] == "ours"


def test_a_hub_that_cannot_be_reached_is_said():
    with pytest.raises(UserError, match=r"task\.path=nobody/nothing is no folder .* task\.path=FOLDER"):
        read_rows("nobody/nothing", "train", "gsm8k", ("question",))


def test_limit(tmp_path):
    assert len(read_rows(str(EXAMPLES), "train", "gsm8k", ("question",), limit=3)) == 3
    with pytest.raises(UserError, match="limit=0"):
        read_rows(str(EXAMPLES), "train", "gsm8k", ("question",), limit=0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3}, no: \\boxed{4}.", "4"),  # the correction counts
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("#### 1,000.", "1,000"),
        ("#### 3\n#### 4", "4"),
        ("\\boxed{7}\n#### 8", "7"),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"),
        ("<think>\\boxed{1}</think> no idea", None),
        ("\\boxed{}", None),
        ("\\boxed{3", None),
        ("3", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("1,000", "1000", True),
        ("$18", "18", True),
        ("18.00", "18", True),
        ("28", "28\\%", True),
        ("1/3", "0.333333333333", False),  # close is not equal
        ("12 \\text{ eggs}", "12", True),
        ("\\frac{1}{2}", "0.5", True),  # from here on it is math-verify that decides
        ("x+1", "1+x", True),
        ("-3", "3", False),
        (None, "3", False),
        ("(" * 12 + "3" + ")" * 12, "3", False),
        ("५ apples", "18", False),  # on which sympy raises
        ("3" * 1001, "3", False),
    ],
)
def test_grading(answer, gold, right):
    assert is_correct(answer, gold) is right


def test_a_verdict_that_takes_too_long_is_no_verdict():
    with pytest.raises(TimeoutError):
        is_correct("10^{100000000}", "4")


def said(text: str) -> Trajectory:
    return Trajectory((Step(State(()), Action(Message("assistant", text))),))


def test_gsm8k_rewards():
    task = GSM8K(str(EXAMPLES), format_reward=0.1)
    example = task.examples("train")[2]
    assert example["answer"].endswith("#### 1,000")
    for text, value, correct, form in [
        ("It is \\boxed{1000}.", 1.1, True, 1.0),
        ("#### 1,000", 1.1, True, 1.0),
        ("It is \\boxed{999}.", 0.1, False, 1.0),
        ("It is 1000.", 0.0, False, 0.0),
        ("\\boxed{1000}\nQuestion: more? Answer: \\boxed{5}", 1.1, True, 1.0),
    ]:
        reward = task.score(example, said(text))
        assert (reward.value, reward.correct, reward.parts["format"]) == (pytest.approx(value), correct, form), text
    unknown = task.score(example, said("\\boxed{10^{100000000}}"))
    assert unknown.value != unknown.value and unknown.parts == {"format": 1.0, "timeout": 1.0}


def test_gsm8k_prompts():
    example = {"question": "How many?", "answer": "#### 1"}
    (chat,) = GSM8K(str(EXAMPLES), prompt="chat").build(example).start().messages
    assert chat.role == "user" and chat.content.startswith("How many?") and "\\boxed{}" in chat.content
    (shot,) = GSM8K(str(EXAMPLES), prompt="one_shot").build(example).start().messages
    assert shot.content.endswith("Question: How many?\nAnswer:") and shot.content.count("Question:") == 2
    with pytest.raises(UserError, match=r"task\.prompt=two_shot is not one of chat, one_shot"):
        GSM8K(prompt="two_shot")


def test_a_prompt_that_leaves_no_room_is_refused_with_its_number(toy):
    task, renderer = GSM8K(str(EXAMPLES)), TokenizerRenderer(Pretrained(str(toy)).tokenizer())
    lengths = [len(renderer.prompt_ids(task.build(e).start().messages)) for e in task.examples("train")]
    longest = max(lengths)
    check_prompts(task, renderer, longest + 8, 8)
    with pytest.raises(UserError, match=f"train example {lengths.index(longest) + 1} has {longest} tokens"):
        check_prompts(task, renderer, longest + 7, 8)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no GSM8K rows on this machine")
def test_gsm8k_grades_its_own_solutions():
    task = GSM8K(str(REAL_DATA))
    train, test = task.examples("train"), task.examples("test")
    assert (len(train), len(test)) == (1000, 1319)
    rows = [*train, *test]
    assert all(task.score(row, said(row["answer"])).correct for row in rows)
    golds = [Fraction(extract_answer(row["answer"]).replace(",", "")) for row in rows]
    for (row, other), (gold, wrong) in zip(pairwise(rows), pairwise(golds), strict=True):
        assert task.score(row, said(other["answer"])).correct == (gold == wrong)


@pytest.mark.slow  # four of them run into the time limit
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no grading cases on this machine")
def test_grading_cases():
    def verdict(case: dict) -> bool | None:
        try:
            return is_correct(extract_answer(case["completion"]), case["gold"])
        except TimeoutError:
            return None

    cases = [json.loads(line) for line in (REAL_DATA / "grading_cases.jsonl").read_text().splitlines()]
    verdicts = [verdict(case) for case in cases]
    assert not [c["id"] for c, v in zip(cases, verdicts, strict=True) if v and not c["correct"]]  # no wrong yes
    assert sum(v == c["correct"] for c, v in zip(cases, verdicts, strict=True)) >= 50
