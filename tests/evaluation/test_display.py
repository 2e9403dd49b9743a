"""Evaluations shown in the terminal."""

from grpo.evaluation.display import history, results_line


def test_a_table_of_evaluations_with_other_metrics_each():
    table = history([(0, {"eval/accuracy": 0.5, "eval/a": 2.0}), (1, {"eval/accuracy": 1.0, "eval/b": 3.0})])
    assert [[*column.cells] for column in table.columns] == [
        ["accuracy", "a", "b"],
        ["50.0%", "2", "-"],
        ["100.0%", "-", "3"],
    ]


def test_a_line_leaves_out_the_time_and_what_never_went_wrong():
    metrics = {"eval/accuracy": 0.125, "eval/timeout": 0.0, "eval/error": 0.25, "time/eval": 3.0}
    assert results_line(metrics) == "eval/accuracy 0.125  eval/error 0.25"
    metrics |= {"eval/words/accuracy": 0.5, "eval/words/length": 3.0}
    assert results_line(metrics).split("\n")[1:] == ["  eval/words/accuracy 0.5  eval/words/length 3"]
