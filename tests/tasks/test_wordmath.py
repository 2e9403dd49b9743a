"""The word problems: correct arithmetic, disjoint sides, rewards, and the hasty author."""

import random
import re

import pytest
from helpers.episodes import said

from grpo.env.messages import Message
from grpo.env.types import Action
from grpo.system.errors import UserError
from tasks import wordmath
from tasks.wordmath import EVENTS, LARGEST, Problem, Wordmath, draw, side


def worked_answers(*arguments, **more) -> list[tuple[str, str]]:
    """Questions and answers."""
    from grpo.extras.demo.demo_model import texts

    return [tuple(pair) for pair in texts(wordmath.worked_answers(*arguments, **more))]


def check(line: str) -> bool:
    sum_, result = line.split("=")
    return eval(sum_) == int(result)


def test_a_problem_worked_by_hand():
    # 14 things, 3 bags of 4 more, 5 lost, sold for 2 dollars each
    problem = Problem("?", start=14, sums=(("+", 3, 4), ("-", 5, None), ("*", 2, None)))
    text, answer = problem.worked(random.Random(0))
    assert text == "3*4=12\n14+12=26\n26-5=21\n21*2=42\n\\boxed{42}"
    assert answer == 42


def test_a_slip_is_carried_on():
    problem = Problem("?", start=14, sums=(("+", 7, None), ("-", 5, None)))
    text, answer = problem.worked(random.Random(0), slips=1.0)
    first, second, box = text.split("\n")
    assert not check(first) and not check(second)
    assert second.startswith(first.split("=")[1] + "-5=")
    assert box == f"\\boxed{{{answer}}}" and second.endswith(f"={answer}")


def test_the_hastiest_author_boxes_the_first_number():
    problem = Problem("?", start=14, sums=(("+", 7, None),))
    assert problem.worked(random.Random(0), hasty=1.0) == ("\\boxed{14}", 14)


def test_every_solution_is_right_and_as_long_as_it_says():
    seen = set()
    for row in Wordmath(steps=(2, 4), train_size=1000).examples("train"):
        *lines, box = row["solution"].split("\n")
        assert all(check(line) for line in lines), row
        assert all(2 <= int(line.split("=")[1]) <= LARGEST for line in lines), row
        assert len(lines) == row["steps"]
        assert lines[-1].endswith("=" + row["answer"]) and box == f"\\boxed{{{row['answer']}}}"
        seen.add(row["steps"])
    assert seen == {2, 3, 4}


def test_every_number_of_the_story_is_used():
    for row in Wordmath(train_size=300).examples("train"):
        told, used = (set(re.findall(r"\d+", row[key])) for key in ("question", "solution"))
        assert told <= used, row


def test_every_event_happens():
    rng = random.Random(0)
    questions = [draw(rng, 4).question for _ in range(1000)]
    for event in EVENTS:
        words = event.text.split("{")[1].split("}")[1]  # what follows the first name
        assert any(words in question for question in questions), event


def test_the_sides_never_meet():
    task = Wordmath(train_size=3000, test_size=500)
    test = {row["question"] for row in task.examples("test")}
    warm = {question for question, _ in worked_answers(3000, seed=0)}
    train = {row["question"] for row in task.examples("train")}
    assert len(test) == 500  # all different
    assert not test & (train | warm)
    # short problems, of which many would be equal by chance alone
    short = {row["question"] for row in Wordmath(steps=(2, 2), test_size=3000, seed=1).examples("test")}
    assert {side(question) for question in short | test} == {"test"}
    assert {side(question) for question in train | warm} == {"train"}


def test_a_tenth_of_all_questions_is_kept_for_the_test():
    rng = random.Random(0)
    share = sum(side(draw(rng, 3).question) == "test" for _ in range(4000)) / 4000
    assert 0.08 < share < 0.12  # 4 standard errors are 0.019


def test_a_row_depends_on_its_index_alone():
    rows = Wordmath().examples("train")
    assert len(rows) == 20000
    assert rows[19999] == rows[-1] == Wordmath(train_size=30000).examples("train")[19999]
    assert rows[0] != rows[1] and rows[1:3] == [rows[1], rows[2]]
    assert rows[0] != Wordmath(seed=1).examples("train")[0]
    assert len(list(Wordmath(train_size=7).examples("train"))) == 7
    with pytest.raises(IndexError):
        rows[20000]


def test_scores():
    task = Wordmath()
    for row in task.examples("test")[:50]:
        right = task.score(row, said(row["solution"]))
        assert (right.value, right.correct, right.parts["format"]) == (1.0, True, 1.0)
        wrong = task.score(row, said(f"\\boxed{{{int(row['answer']) + 1}}}"))
        assert (wrong.value, wrong.correct, wrong.parts["format"]) == (0.0, False, 1.0)
        bare = task.score(row, said(row["answer"]))
        assert (bare.value, bare.correct, bare.parts["format"]) == (0.0, False, 0.0)


def test_the_prompt_is_the_question():
    row = Wordmath().examples("test")[0]
    env = Wordmath().build(row)
    state = env.start()
    assert state.messages == (Message("user", row["question"]),)
    assert env.step(Action(Message("assistant", "\\boxed{1}"))) is None


def test_hasty_answers_are_shorter_and_mostly_wrong():
    from grpo.extras.grading.answers import extract_answer

    clean = worked_answers(1000, seed=0)
    hasty = worked_answers(1000, seed=0, hasty=0.5)
    clean_lines, hasty_lines = (sum(answer.count("\n") for _, answer in pairs) for pairs in (clean, hasty))
    assert 2800 < clean_lines < 3200  # 2, 3 and 4 are equally frequent
    assert hasty_lines < 1000  # 1/2 + 1/4 + 1/8 + 1/16 at most
    for _, answer in hasty:
        *lines, box = answer.split("\n")
        assert not lines or extract_answer(box) == lines[-1].split("=")[1]


def test_slips_come_as_often_as_asked():
    lines = [line for _, answer in worked_answers(1000, 0, slips=0.1) for line in answer.split("\n")[:-1]]
    wrong = sum(not check(line) for line in lines if "/" not in line)
    assert 0.07 < wrong / len(lines) < 0.13


def test_an_unknown_split_is_told():
    with pytest.raises(UserError, match="train, validation or test"):
        Wordmath().examples("dev")
