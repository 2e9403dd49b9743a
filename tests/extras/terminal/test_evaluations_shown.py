"""Evaluations shown in the terminal: their lines, and the table."""

import math

from grpo.evaluation.intervals import Estimate
from grpo.extras.terminal.evaluations import history, result_lines, sparkline


def test_a_table_of_evaluations_with_other_metrics_each():
    table = history([(0, {"eval/accuracy": 0.5, "eval/a": 2.0}), (1, {"eval/accuracy": 1.0, "eval/b": 3.0})])
    assert [[*column.cells] for column in table.columns] == [
        ["accuracy", "a", "b"],
        ["50.0 %", "2", "-"],
        ["100.0 %", "-", "3"],
    ]


def test_the_line_of_an_evaluation_and_of_each_set():
    found = {"accuracy": Estimate(0.765, 0.702, 0.818, 200), "length": Estimate(26.7, 26, 27, 200)}
    assert result_lines(10, found) == ["after 10: 76.5 % (70.2 to 81.8), 27 tokens"]
    found |= {"words/accuracy": Estimate(0.5, math.nan, math.nan, 1), "words/length": Estimate(3.0, 3, 3, 1)}
    assert result_lines(0, found)[1:] == ["  words: 50.0 %, 3 tokens"]
    assert result_lines(9, {"accuracy": Estimate(math.nan, math.nan, math.nan, 0)}) == ["after 9: -"]
    assert sparkline([0.0, 0.124, 0.125, 0.5, math.nan, 1.0]) == "▁▁▂▅ █"
