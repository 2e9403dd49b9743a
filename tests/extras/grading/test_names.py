"""Reward functions are found by name, and `correct` has the grader of mathematics."""

from grpo.extras.grading import functions
from grpo.extras.grading.grading import MATHEMATICS
from grpo.rewards.basic import same_text
from grpo.rewards.grader import Grader
from grpo.rewards.resolve import locate


def test_names_of_functions_are_found_in_conf():
    assert locate("same_text") is same_text and locate("correct") is functions.correct
    assert functions.correct.grader is MATHEMATICS
    assert not {name for name in vars(Grader) if name[0] != "_"} - {*dir(MATHEMATICS)}
    for name in ("longer", "ungraded", "correct"):  # by the name that the module had before
        assert locate(f"grpo.rewards.functions.{name}") is locate(name)
