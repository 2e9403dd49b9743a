"""Quizzes: the sums, their answers, and the rewards of an episode, worked by hand."""

import random

import pytest

from grpo.env.messages import Message
from grpo.env.types import Action, Reward, State
from grpo.system.errors import UserError
from tasks.quiz import Episode, Quiz, answer, draw, worked_answers
from tasks.wordmath import Problem, side


def action(text: str, truncated: bool = False) -> Action:
    return Action(Message("assistant", text), truncated)


def test_rewards_of_a_quiz():
    episode = Episode(["4 +3", "6 -4", "9 -3", "5 -2"], ["7", "2", "6", "3"])
    first = episode.start()
    assert (first.messages, first.reward) == ((Message("user", "4 +3"),), 0.0)
    second = episode.step(action("4+3=7\n\\boxed{7}"))
    assert second.reward == 0.25
    assert second.messages == (Message("user", "6 -4"),)
    assert episode.step(action("\\boxed{6}")).reward == 0.0
    assert episode.step(action("6")).reward == 0.0  # right, but not in a box
    assert episode.step(action("\\boxed{3}")) == Reward(0.5, False)  # two of four


def test_all_right_is_correct():
    episode = Episode(["6 -4", "9 -3"], ["2", "6"])
    episode.start()
    assert isinstance(episode.step(action("\\boxed{2}")), State)
    assert episode.step(action("\\boxed{6}")) == Reward(1.0, True)


def test_an_answer_cut_short_ends_the_quiz():
    episode = Episode(["6 -4", "9 -3"], ["2", "6"])
    episode.start()
    assert episode.step(action("6-4=2\n\\boxed{2}\n", truncated=True)) == Reward(0.5, False)


def test_the_operations_apply_from_left_to_right():
    problem = Problem("3 +5 -2 -4", 3, (("+", 5, None), ("-", 2, None), ("-", 4, None)))
    said = answer(problem, random.Random(0), hasty=0.0, slips=0.0)
    assert said == "3+5=8\n8-2=6\n6-4=2\n\\boxed{2}"
    assert answer(problem, random.Random(0), hasty=1.0, slips=0.0) == "3+5=8\n\\boxed{8}"


def test_an_author_rambles_after_the_working_only():
    problem = Problem("3 +5 -2", 3, (("+", 5, None), ("-", 2, None)))
    clean = ["3+5=8", "8-2=6"]
    rambled = 0
    for seed in range(400):
        *lines, box = answer(problem, random.Random(seed), hasty=0.5, slips=0.0).split("\n")
        if len(lines) < 2:
            assert (lines, box) == (clean[:1], "\\boxed{8}")
        else:
            assert (lines[:2], box) == (clean, "\\boxed{6}")
            assert set(lines[2:]) <= {"6+0=6"}
            rambled += len(lines) > 2
    # 400 * 0.5 authors finish, and 0.35 of them ramble: 70 on average, with a standard deviation of 7.6
    assert 40 <= rambled <= 100


def test_one_operation_is_answered_with_care():
    problem = Problem("1 +8", 1, (("+", 8, None),))
    assert {answer(problem, random.Random(seed), 0.9, 0.9) for seed in range(50)} == {"1+8=9\n\\boxed{9}"}


def test_numbers_have_one_digit():
    rng = random.Random(1)
    for _ in range(300):
        problem = draw(rng, 4)
        values = [problem.start]
        for sign, n, _ in problem.sums:
            values.append(values[-1] + (n if sign == "+" else -n))
        assert set(values) <= set(range(10))
        assert values[-1] not in values[:-1]


def test_rows():
    task = Quiz(sums=4, operations=(2, 3), test_size=30)
    train, test, validation = (
        [task.examples(split)[i] for i in range(30)] for split in ("train", "test", "validation")
    )
    assert test != validation
    for split, rows in (("train", train), ("test", test), ("test", validation)):
        for row in rows:
            assert len(row["questions"]) == len(row["answers"]) == 4
            assert {side(question) for question in row["questions"]} == {split}
            assert {len(question.split()) - 1 for question in row["questions"]} == {row["steps"]}
    assert {row["steps"] for row in train} == {2, 3}
    assert task.row("train", 7) == Quiz(sums=4, operations=(2, 3)).row("train", 7)


def test_the_warm_up_has_train_sums_alone():
    for conversation in worked_answers(40, 3, hasty=0.5, slips=0.1):
        question, said = conversation.messages
        assert (question.role, said.role, side(question.content)) == ("user", "assistant", "train")


def test_operations_in_order():
    with pytest.raises(UserError, match=r"task.operations=\[3, 2\]"):
        Quiz(operations=(3, 2))
