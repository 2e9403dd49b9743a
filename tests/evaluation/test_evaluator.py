"""Evaluations: numbers worked by hand, strict and lenient, in batches, killed and resumed; comparisons of runs."""

import io
import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pandas as pd
import pytest
from conftest import EXAMPLES, REAL_DATA, ROOT, compose_config
from helpers import programs
from helpers.runs import learned, told
from rich.console import Console

import eval as eval_script
from grpo.apps.scorecard import Scorecard, estimates_by_value
from grpo.apps.show_evaluation import show_comparison
from grpo.config.validation import check_values
from grpo.data.rows import fingerprint
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, SingleTurn, State, Step, Trajectory
from grpo.evaluation import estimates as estimates_module
from grpo.evaluation.estimates import (
    all_of_k,
    averaged,
    columns,
    estimates,
    majority,
    pass_at_k,
    powers,
    values_of,
)
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.grading.answers import equal, loose_answer
from grpo.extras.report.comparison import arms_of, compare
from grpo.rollout.samples_table import records, write
from grpo.rollout.types import Sample
from grpo.runs.run import Run
from grpo.system.errors import RolloutError, UserError
from tasks.calculator import Calculator
from tasks.countdown import Countdown
from tasks.gsm8k import GSM8K
from tasks.jsonl import Jsonl
from tasks.math import Math
from tasks.mixture import Mixture
from tasks.wordmath import Wordmath

GSM8K_TEST, MATH_TEST = REAL_DATA / "gsm8k_test.jsonl", REAL_DATA / "math500_test.jsonl"


def episode(text: str, prompt: str = "q", **more) -> Trajectory:
    return Trajectory((Step(State((Message("user", prompt),)), Action(Message("assistant", text))),), **more)


def sample(right: bool | None, tokens: int = 2, text: str = "", example=None, **parts: float) -> Sample:
    """Return a sample that is right, wrong, or (None) unknown."""
    reward = Reward(math.nan if right is None else float(right), bool(right), parts)
    return Sample(
        example or {}, episode(text), (Turn((1,), Completion((2,) * tokens, (-1.0,) * tokens, "stop")),), reward
    )


def frame(groups, **more) -> pd.DataFrame:
    return pd.DataFrame(records(groups, **more))


# -- numbers by hand


@pytest.mark.parametrize(
    ("n", "c", "k", "any_of", "all_of"),
    [(4, 1, 1, 0.25, 0.25), (4, 2, 2, 5 / 6, 1 / 6), (4, 3, 2, 1.0, 0.5), (5, 0, 5, 0.0, 0.0), (5, 5, 5, 1.0, 1.0)],
)
def test_pass_at_k_and_all_of_k(n, c, k, any_of, all_of):
    assert pass_at_k(n, c, k) == pytest.approx(any_of) and all_of_k(n, c, k) == pytest.approx(all_of)


def test_the_k_of_pass_at_k():
    assert [powers(n) for n in (1, 2, 3, 8, 10)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 10]]


@pytest.mark.parametrize(
    ("answers", "right", "value"),
    [
        (["3", "3", "4"], [True, True, False], 1.0),
        (["3", "4", "4"], [True, False, False], 0.0),
        (["3", "4"], [True, False], 0.5),  # a tie is drawn by lot
        (["3", "4", "5", None], [True, False, False, False], 1 / 3),
        (["0.5", "1/2", "7", "\\frac{1}{2}"], [True, True, False, True], 1.0),  # three spellings of one answer
        (["7", None, None], [True, False, False], 1.0),  # a sample without an answer has no vote
        ([None, float("nan")], [False, False], 0.0),
    ],
)
def test_majority(answers, right, value):
    assert majority(answers, right, equal) == pytest.approx(value)


def test_a_majority_does_not_depend_on_the_order_of_samples():
    """28 equals 28\\%, which equals 0.28, which does not equal 28: three votes, of which two are right, beside two for 7."""
    samples = [("28", True), ("28\\%", True), ("0.28", False), ("7", False), ("7", False)]
    found = {majority(*map(list, zip(*order, strict=True)), equal) for order in permutations(samples)}
    assert found == {2 / 3}


def test_a_small_evaluation_by_hand():
    groups = [
        [sample(True, 3, format=1.0), sample(False, 9, format=0.0)],
        [sample(False, 2, format=1.0), sample(False, 2, format=0.0)],
    ]
    found = estimates(frame(groups, answer=[["1", "2"], [None, "3"]], correct_lenient=[[True, True], [False, False]]))
    assert {name: estimate.value for name, estimate in found.items()} == {
        "accuracy": 0.25,
        "accuracy_lenient": 0.5,
        "pass@2": 0.5,
        "pass^2": 0.0,
        "maj@2": 0.25,  # (a tie of right and wrong, and wrong) / 2
        "length": 4.0,
        "truncated": 0.0,
        "format": 0.5,
    }
    assert all(estimate.n == 2 for estimate in found.values())
    # Wilson's interval of 1 of 2 with z = 1.96: (1/2 + z^2/4 -+ z sqrt(1/8 + z^2/16)) / (1 + z^2/2)
    assert found["pass@2"][1:3] == pytest.approx((0.0945, 0.9055), abs=1e-4)
    # Student's t with one degree of freedom, 12.71: 4 -+ 12.71 * 2 / 1
    assert found["length"][1:3] == pytest.approx((4 - 25.41, 4 + 25.41), abs=0.01)


def test_what_nobody_could_tell_is_left_out():
    groups = [[sample(True), sample(None)], [sample(False), sample(False)], [sample(None), sample(None)]]
    lenient = [[True, None], [True, False], [None, None]]
    found = estimates(frame(groups, answer=[["1", "2"], ["3", "4"], ["5", "6"]], correct_lenient=lenient))
    assert (found["accuracy"].value, found["accuracy"].n) == (0.5, 2)  # problems: 1, 0, unknown
    assert (found["accuracy_lenient"].value, found["accuracy_lenient"].n) == (0.75, 2)
    assert (found["pass@2"].value, found["pass@2"].n) == (0.0, 1)  # only the second problem has two known samples
    assert (found["maj@2"].value, found["maj@2"].n) == (0.5, 2)
    lenient[1] = [True, None]  # of a known sample: the lenient accuracy would be over others than the accuracy
    partly = estimates(frame(groups, answer=[["1", "2"], ["3", "4"], ["5", "6"]], correct_lenient=lenient))
    assert not {"accuracy_lenient", "maj@2"} & partly.keys() and partly["accuracy"].n == 2
    # right, wrong, wrong, unknown: 1 - C(2, 2) / C(3, 2) = 2/3 for the known three, and no pass@4
    four = estimates(frame([[sample(True), sample(False), sample(False), sample(None)]]))
    assert (four["pass@2"].value, four["pass@2"].n) == (pytest.approx(2 / 3), 1)
    assert (four["pass^2"].value, four["pass@4"].n, four["accuracy"].value) == (0.0, 0, pytest.approx(1 / 3))
    nobody = estimates(frame([[sample(None)]]))
    assert math.isnan(nobody["accuracy"].value) and nobody["accuracy"].n == 0 and "maj@1" not in nobody


def test_parts_that_are_called_like_our_metrics_stand_beside_them():
    parts = {"accuracy": 7.0, "length": -3.0, "pass@2": 0.25, "brevity": 1.0}
    found = estimates(frame([[sample(True, **parts), sample(False, **parts)]]))
    assert {name: estimate.value for name, estimate in found.items()} == {
        "accuracy": 0.5, "pass@2": 1.0, "pass^2": 0.0, "length": 2.0, "truncated": 0.0, "brevity": 1.0,
        "reward/accuracy": 7.0, "reward/length": -3.0, "reward/pass@2": 0.25,
    }  # fmt: skip


def test_an_interval_counts_problems_and_not_samples():
    """Eight samples that always agree give no more information than one."""
    one = [[sample(i < 3)] for i in range(10)]
    eight = [[sample(i < 3)] * 8 for i in range(10)]
    assert estimates(frame(eight))["accuracy"] == pytest.approx(estimates(frame(one))["accuracy"])


# -- strict and lenient


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{7}, not 8", "7"),
        ("#### 7\nthat is all 3 of us", "7"),
        ("The answer is 1,234.", "1,234"),
        ("16-7=9", "9"),
        ("it is -5 degrees", "-5"),
        ("she makes $18 and $20.", "20"),
        ("5 + 6 = \\(11\\)", "11"),
        ("It is $\\frac{3}{4}$.", "\\frac{3}{4}"),
        ("up by 20%.", "20%"),
        ("<think>\\boxed{4}", "4"),  # in an unfinished thought
        ("no idea", None),
    ],
)
def test_what_a_reader_would_take_for_the_answer(text, answer):
    assert loose_answer(text) == answer


def claim(task, text, row=None, **more):
    row = row or {"question": "?", "answer": "So #### 18"}
    found = task.claims(row, episode(text, **more))
    return found.answer, found.lenient


def test_claims_of_tasks():
    gsm8k = GSM8K(str(EXAMPLES))
    gsm8k.gold = lambda example: "18"
    assert claim(gsm8k, "\\boxed{18}") == ("18", True)
    assert claim(gsm8k, "It is 18.") == (None, True)
    assert claim(gsm8k, "It is 18.\nQuestion: 7?") == (None, True)  # text after the answer is not read
    assert claim(gsm8k, "It is 17.") == (None, False)
    assert claim(gsm8k, "\\boxed{17} or 18") == ("17", False)
    row = {"question": "?", "answer": "18", "steps": 2}
    assert claim(Calculator(), "\\boxed{18}", row) == ("18", True)
    assert claim(Calculator(), "\\boxed{18}", row, end="out_of_turns") == (None, False)  # also graded as no answer
    assert Countdown().claims(Countdown().examples("test")[0], episode("18")) is None  # it does not use `correct`
    prefilled = Jsonl(str(EXAMPLES / "test.jsonl"), ["correct"], prompt="asked", gold="gold")
    prefill = State((Message("user", "?"), Message("assistant", "\\boxed{")))
    trajectory = Trajectory((Step(prefill, Action(Message("assistant", "18}"))),))
    asked = {"asked": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\\boxed{"}], "gold": 18}
    assert prefilled.claims(asked, trajectory).answer == "18"


def test_claims_that_fail_are_told_and_end_nothing(caplog):
    class Raises(Wordmath):
        def claims(self, example, trajectory):
            raise OSError("no judge")

    found = columns(Raises(), [[sample(True), sample(False)], [sample(True)]])
    assert (
        found == {"gold": [[None, None], [None]]}
        and "claims failed on 3 samples, the first: OSError: no judge" in caplog.text
    )


def test_claims_that_hang_are_reported_and_end_nothing(monkeypatch, caplog):
    class Hangs(Wordmath):
        def claims(self, example, trajectory):
            threading.Event().wait(60)

    monkeypatch.setattr(estimates_module, "TIMEOUT", 0.05)
    found = columns(Hangs(), [[sample(True)]])
    assert found == {"gold": [[None]]}
    assert "claims failed on 1 sample, the first: TimeoutError: it took longer than 0.05 s" in caplog.text


def test_a_mixture_is_told_source_by_source():
    mixture = Mixture({"words": {"task": Wordmath()}, "countdown": {"task": Countdown()}})
    rows = mixture.examples("test")
    texts = [f"\\boxed{{{rows[0]['example']['answer']}}}", "none", f"It is {rows[2]['example']['answer']}.", "none"]
    groups = []
    for row, text in zip((rows[0], rows[1], rows[2], rows[3]), texts, strict=True):
        reward = mixture.score_group(row, [episode(text)])[0]
        groups.append([Sample(row, episode(text), (Turn((1,), Completion((2,), (-1.0,), "stop")),), reward)])
    samples = frame(groups, **columns(mixture, groups, by=("source", "steps", "level")))
    found, whole = estimates_by_value(samples)["source"], estimates(samples)
    assert [found[source]["accuracy"].value for source in ("words", "countdown")] == [0.5, 0.0]
    assert found["words"]["accuracy"].value == whole["words/correct"].value and found["words"]["accuracy"].n == 2
    assert found["words"]["accuracy_lenient"].value == 1.0 and "accuracy_lenient" not in found["countdown"]
    assert whole["accuracy"].value == 0.25 and "accuracy_lenient" not in whole  # it would be over other problems
    steps = {row["example"]["steps"] for row in (rows[0], rows[2])}
    assert set(estimates_by_value(samples)["steps"]) == {str(s) for s in steps} and "level" not in estimates_by_value(
        samples
    )


def test_a_value_may_be_0_and_a_sample_without_a_conversation_has_no_calls():
    assert values_of({"level": 0, "empty": "", "x": None}, ("level", "empty", "x", "y")) == {
        "by/level": "0",
        "by/empty": "",
    }
    samples = {"tokens": [1, 2], "truncated": [False, True], "outcome": [None, None], "turns": [3, 1]}
    samples |= {"end": ["answered", "answered"], "eval/tool_calls": [2.0, math.nan]}
    assert dict(averaged(pd.DataFrame(samples)))["tool_calls"].tolist() == [2.0, 0.0]


@pytest.mark.skipif(not GSM8K_TEST.exists(), reason="no real data")
def test_a_right_answer_without_its_form_is_lenient_on_all_of_gsm8k():
    task = GSM8K(str(GSM8K_TEST), splits={"test": "test"}, held_out={"test": 0.999})
    rows = [json.loads(line) for line in GSM8K_TEST.read_text().splitlines()]
    wrong = []
    for row in rows:
        reasoning, _, gold = row["answer"].partition("####")
        formless = task.claims(row, episode(f"{reasoning}\nThe answer is {gold.strip()}."))
        assert formless.answer is None
        wrong += [] if formless.lenient else [row]
        assert task.claims(row, episode(row["answer"])).lenient  # strict implies lenient
    assert len(rows) == 1319 and not wrong


@pytest.mark.skipif(not MATH_TEST.exists(), reason="no real data")
def test_levels_and_subjects_of_real_problems():
    task = Math(str(MATH_TEST), splits={"test": "test"}, held_out={"test": 0.999})
    rows = [json.loads(line) for line in MATH_TEST.read_text().splitlines()[:100]]
    groups = []
    for row in rows:
        said = episode(row["solution"])
        groups.append([Sample(row, said, (Turn((1,), Completion((2,), (-1.0,), "stop")),), task.score(row, said))])
    samples = frame(groups, **columns(task, groups, by=("level", "subject")))
    found = estimates_by_value(samples)
    assert [int(level) for level in found["level"]] == [1, 2, 3, 4, 5]
    for level, of in found["level"].items():
        assert of["accuracy"].n == sum(str(row["level"]) == level for row in rows)
        assert of["accuracy"].value == of[f"level_{level}"].value == 1.0 == of["accuracy_lenient"].value
    assert set(found["subject"]) == {row["subject"] for row in rows}


# -- batches


def test_batches_change_nothing_but_the_last_bits(parts):
    task = Wordmath()
    of = {}
    for batch in (None, 1, 4):
        evaluator = Evaluator(Sampling(6, temperature=1.0), samples=2, limit=6, batch=batch)
        of[batch] = evaluator(task, *parts, seed=3)
    ids = {
        batch: [[sample.turns[0].completion.ids for sample in group] for group in evaluation.groups]
        for batch, evaluation in of.items()
    }
    assert ids[None] == ids[1] == ids[4] and of[None].metrics == of[1].metrics == of[4].metrics
    assert len({str(group) for group in ids[1]}) == 6  # seeds depend on the index among all examples
    assert Evaluator(Sampling(1, temperature=0.0), batch=4).batches(6) == [range(0, 4), range(4, 6)]


def test_sets_are_evaluated_as_they_would_be_alone(parts):
    """Two sets beside the task: one with the same task, and one whose samples have another column."""
    sampling = Sampling(6, temperature=1.0)
    alone = Evaluator(sampling, limit=3)
    own, other = alone(Wordmath(), *parts, seed=3), alone(GSM8K(str(EXAMPLES)), *parts, seed=3)
    sets = {"same": {"task": Wordmath(), "max_tokens": 7}, "shop": {"task": GSM8K(str(EXAMPLES))}}
    several = replace(alone, sets=sets, by=("steps",))
    found = several(Wordmath(), *parts, seed=3)
    assert found.estimates == {
        **own.estimates,
        **{f"same/{name}": estimate for name, estimate in own.estimates.items()},
        **{f"shop/{name}": estimate for name, estimate in other.estimates.items()},
    }
    assert found.columns["set"] == [[None]] * 3 + [["same"]] * 3 + [["shop"]] * 3 and len(found.groups) == 9
    table = frame(found.groups, **found.columns)
    assert table["by/steps"].notna().tolist() == [True] * 6 + [False] * 3
    assert list(alone.loaded(Wordmath())) == ["train", "test"] and "set" not in own.columns
    few = {name: [source.examples(split)[0]] for name, (source, split) in several.sources(Wordmath()).items()}
    assert several(Wordmath(), *parts, seed=3, examples=few).estimates["shop/accuracy"].n == 1


@pytest.mark.parametrize("name", ["a/b", "train", "test"])
def test_names_of_sets_that_would_be_mistaken_are_refused(name):
    with pytest.raises(UserError, match=rf"eval\.sets\.{name} needs a task and a name of its own"):
        Evaluator(Sampling(6), sets={name: {"task": Wordmath()}})
    with pytest.raises(UserError, match=r"eval\.sets\.easy needs a task"):
        Evaluator(Sampling(6), sets={"easy": {"max_tokens": 3}})


def test_sets_are_for_training(tmp_path):
    sets = "eval.sets={easy: {task: {_target_: tasks.wordmath.Wordmath}}}"
    with pytest.raises(UserError, match=r"eval\.sets is for evaluations during training"):
        eval_script.evaluate(compose_config(sets, f"output_dir={tmp_path}", name="eval"))


def test_a_set_called_like_a_source_of_the_mixture_is_refused(parts):
    task = Mixture({"shop": {"task": GSM8K(str(EXAMPLES))}})
    evaluator = Evaluator(Sampling(4, temperature=0.0), limit=1, sets={"shop": {"task": GSM8K(str(EXAMPLES))}})
    with pytest.raises(UserError, match=r"eval\.sets\.shop: eval/shop/\w+ is another metric already"):
        evaluator(task, *parts, seed=0)


def test_when_a_run_is_evaluated():
    """Each third of 10 rollouts and the last; with a delay of 6 not the first of them, and the last in any case."""
    every = partial(Evaluator, Sampling(4), every=3)
    due = [
        [r for r in range(11) if evaluator.due(r, 10)]
        for evaluator in (every(), every(delay=6), every(on_start=False, delay=99))
    ]
    assert due == [[0, 3, 6, 9, 10], [0, 6, 9, 10], [10]]
    assert not any(Evaluator(Sampling(4), every=0).due(r, 10) for r in range(11))


class Breaks:
    """A task whose environments fail from example `first` on."""

    def __init__(self, first: int = 2) -> None:
        self.first = first

    def examples(self, split):
        return [{"i": i} for i in range(3)]

    def build(self, example):
        if example["i"] >= self.first:
            raise RuntimeError("the door is locked")
        return SingleTurn((Message("user", "?"),))

    def score(self, example, trajectory):
        return Reward(1.0, True)


def test_a_batch_whose_environments_all_fail_ends_nothing_but_the_first(parts):
    evaluator = Evaluator(Sampling(2, temperature=0.0), batch=1)
    evaluation = evaluator(Breaks(), *parts, seed=0)
    metrics = evaluation.metrics
    assert metrics["eval/accuracy"] == 1.0 and metrics["eval/env_error"] == pytest.approx(1 / 3)
    assert evaluation.estimates["accuracy"].n == 2 and evaluation.estimates["env_error"].n == 3
    assert replace(evaluation, seconds=2.0).metrics == {**metrics, "time/eval": 2.0}
    with pytest.raises(RolloutError, match="all 1 episodes"):
        evaluator(Breaks(first=0), *parts, seed=0)


# -- eval.py: stopped and resumed


@pytest.fixture
def overrides(toy):
    return ("task=wordmath", "model=path", f"model.path={toy}", "trainer=cpu", "max_tokens=24", "eval.limit=36",
            "eval.batch=3", "eval.samples=2", "eval.sampling.temperature=1")  # fmt: skip


@pytest.mark.slow
def test_killed_in_the_middle_and_gone_on_with_it_is_the_same(overrides, tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    eval_script.evaluate(compose_config(*overrides, f"output_dir={whole}", name="eval"))
    assert "parts" not in {file.name for file in whole.iterdir()}

    streams = {"out": tmp_path / "out", "err": tmp_path / "err"}
    process = programs.start("eval.py", *overrides, f"hydra.run.dir={killed}", **streams)
    while len(list(killed.glob("parts/*.parquet"))) < 3 and process.exitcode is None:
        time.sleep(0.01)
    process.kill()
    process.join()
    done = sorted(file.name for file in killed.glob("parts/*.parquet"))
    assert 3 <= len(done) < 12 and done[:3] == ["000000.parquet", "000003.parquet", "000006.parquet"]
    assert json.loads((killed / "manifest.json").read_text())["status"] == "running"
    assert "eval.samples=4 (was 2)" in told(*overrides, "eval.samples=4", f"output_dir={killed}", name="eval")

    capsys.readouterr()
    eval_script.evaluate(compose_config(*overrides, f"output_dir={killed}", name="eval"))
    said = capsys.readouterr().out
    assert f"resuming after {3 * len(done)} of 36 problems" in said and "95 % interval" in said
    assert (whole / "metrics.json").read_text() == (killed / "metrics.json").read_text()
    pd.testing.assert_frame_equal(
        pd.read_parquet(whole / "samples.parquet"), pd.read_parquet(killed / "samples.parquet")
    )
    assert len(pd.read_parquet(killed / "samples.parquet")) == 72 and not (killed / "parts").exists()
    manifest = json.loads((killed / "manifest.json").read_text())
    assert (manifest["status"], manifest["problems"]) == ("finished", 36)

    # the third time the result is read from disk: there is no model any more
    gone = [o if "model.path" not in o else "model.path=nowhere" for o in overrides]
    (killed / "config.yaml").write_text((killed / "config.yaml").read_text().replace(overrides[2][11:], "nowhere"))
    eval_script.evaluate(compose_config(*gone, f"output_dir={killed}", name="eval"))
    said = capsys.readouterr().out
    assert "had finished before" in said and "pass@2" in said and "steps" in said


@pytest.mark.slow
def test_parts_of_another_policy_or_other_rows_are_refused(overrides, tmp_path, monkeypatch):
    config = compose_config(*overrides, f"output_dir={tmp_path / 'run'}", name="eval")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo.apps.show_evaluation.Bar.show", stop)  # after the first batch
    with pytest.raises(KeyboardInterrupt):
        eval_script.evaluate(config)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "interrupted"
    part = tmp_path / "run" / "parts" / "000000.parquet"
    rows = pd.read_parquet(part).assign(item="0" * 12).to_dict("records")
    write(part, rows)
    with pytest.raises(UserError, match="begun with other examples"):
        eval_script.evaluate(config)
    (tmp_path / "run" / "parts" / "policy.txt").write_text("another")
    with pytest.raises(UserError, match="begun with another policy"):
        eval_script.evaluate(config)


def test_a_resumed_evaluation_counts_the_problems_that_are_done_and_refuses_other_examples(tmp_path):
    """The first problem has one right sample of two, the second has two."""
    examples = [{"n": 1}, {"n": 2}]
    items = [fingerprint(examples[i]) for i in (0, 0, 1, 1)]
    part = {"prompt_index": [0, 0, 1, 1], "item": items, "correct": [True, False, True, True], "reward": [1.0, 0, 1, 1]}
    begun = Scorecard(tmp_path, examples, "policy")
    pd.DataFrame(part).to_parquet(begun.file(range(2)))
    resumed = Scorecard(tmp_path, examples, "policy")
    assert not resumed.recovered(range(2, 4)) and resumed.recovered(range(2))
    assert resumed.progress() == {"problems": 2, "num_problems": 2, "accuracy": 0.75}
    with pytest.raises(UserError, match="begun with other examples"):
        Scorecard(tmp_path, [{"n": 1}, {"n": 3}], "policy").recovered(range(2))


# -- comparisons


def left_behind(folder, right: dict[str, list[bool]], file: str = "samples.parquet"):
    """Write the files of an evaluation. right: for each item, whether each of its samples is right. Returns the folder."""
    groups = [[sample(one, example={"item": item}) for one in ones] for item, ones in right.items()]
    rows = [{**row, "item": groups[row["prompt_index"]][0].example["item"]} for row in records(groups)]
    write(folder / file, rows)
    (folder / "config.yaml").write_text("seed: 0\n")
    return str(folder)


def test_two_evaluations_on_what_they_share(tmp_path):
    """On five shared problems, b is right on three more than a and wrong on none more: exact McNemar 2 * (1/2)^3 = 0.25."""
    a = {"0": [True], "1": [False], "2": [False], "3": [False], "4": [True], "only a": [True]}
    b = {"4": [True], "3": [True], "2": [True], "1": [True], "0": [True], "only b": [False], "too": [False]}
    found = compare(arms_of([left_behind(tmp_path / "a", a), left_behind(tmp_path / "b", b)]))
    assert found["items"] == {"common": 5, "A": 6, "B": 7}
    assert [found["arms"][arm]["eval/accuracy"]["value"] for arm in "AB"] == [0.4, 1.0]
    (row,) = found["comparisons"]
    assert row["difference"]["value"] == pytest.approx(0.6) and row["p_value"] == 0.25 == row["p_holm"]
    assert (row["better"], row["worse"], row["ties"], row["test"]) == (3, 0, 2, "exact McNemar")


def shown(comparison: dict) -> list[str]:
    """Return the lines of a comparison in a terminal of 80 columns."""
    out = Console(width=80, file=io.StringIO())
    show_comparison(out, comparison)
    return out.file.getvalue().splitlines()


def test_a_comparison_fits_into_80_columns(tmp_path):
    """Three arms with three-digit counts and the widest intervals: no cell is broken, and a second metric that is the same as
    accuracy has one line."""
    rights = [[i < 20 for i in range(300)], [i >= 10 for i in range(300)], [i >= 290 for i in range(300)]]
    folders = [
        left_behind(tmp_path / str(arm), {str(i): [one] for i, one in enumerate(right)})
        for arm, right in enumerate(rights)
    ]
    for folder in folders:
        file = Path(folder) / "samples.parquet"
        pd.read_parquet(file).assign(correct_lenient=lambda table: table["correct"]).to_parquet(file)
    lines = shown(compare(arms_of(folders)))
    assert max(map(len, lines[3:])) <= 80  # the first ones have the folders
    # 300 problems: b is right on the 280 that a misses and on 10 of a's 20; c on 10 others
    (row,) = [line for line in lines if "B - A" in line]
    assert row.split("│")[2].strip().startswith("90.0 % (") and row.split("│")[5].strip() == "280/10/10"
    assert not [line for line in lines if "accuracy_lenient" in line and "│" in line]
    assert lines[-2:] == [
        "accuracy_lenient is the same in every number",
        "p (Holm): the 2 comparisons with A in one metric are one family",
    ]
    pd.read_parquet(file).assign(correct_lenient=True).to_parquet(file)
    two = shown(compare(arms_of(folders[1:])))
    assert max(map(len, two[2:])) <= 80 and "Holm" not in "".join(two) and two[-1] == "exact McNemar"
    assert next(line for line in two if line.startswith("│ B ")).split("│")[3].strip().startswith("100.0 % (")


def test_seeds_in_brackets_are_one_arm(tmp_path):
    seeds = [
        left_behind(tmp_path / str(i), {str(p): [p % 3 == 0 or (p + i) % 4 == 0] for p in range(12)}) for i in range(4)
    ]
    found = compare(arms_of([seeds[:2], seeds[2:]]))
    assert [found["arms"][arm]["runs"] for arm in "AB"] == [2, 2]
    means = [Run(folder).verdicts()["accuracy"].mean() for folder in seeds]
    assert found["arms"]["A"]["eval/accuracy"]["value"] == pytest.approx(sum(means[:2]) / 2)
    assert found["arms"]["B"]["eval/accuracy"]["value"] == pytest.approx(sum(means[2:]) / 2)
    assert found["comparisons"][0]["test"] == "t over seeds and problems"
    with pytest.raises(UserError, match="needs two or more"):
        arms_of(seeds[:1])
    with pytest.raises(UserError, match="no problem in common"):
        compare(arms_of([seeds[0], left_behind(tmp_path / "other", {"x": [True]})]))


def test_a_sweep_is_compared_by_its_arms_without_what_is_not_finished(tmp_path, caplog):
    right = [[True, False, True], [True, True, True], [False, False, False], [True, False, False], [False] * 3]
    for job, (algo, answers) in enumerate(zip(["grpo", "grpo", "dapo", "dapo", "dapo"], right, strict=True)):
        folder = tmp_path / str(job)
        folder.mkdir()
        left_behind(folder, {str(p): [one] for p, one in enumerate(answers)})
        status = "failed" if job == 4 else "finished"
        (folder / "config.yaml").write_text(json.dumps({"algo": algo, "seed": job}))
        told = {"status": status, "overrides": [f"algo={algo}", f"seed={job}"]}
        (folder / "manifest.json").write_text(json.dumps(told))
    found = compare(arms_of([str(tmp_path)]))
    assert {arm["name"]: (arm["runs"], arm["eval/accuracy"]["value"]) for arm in found["arms"].values()} == {
        f"{tmp_path}: algo=grpo": (2, pytest.approx(5 / 6)),
        f"{tmp_path}: algo=dapo": (2, pytest.approx(1 / 6)),
    }
    assert f"left out because they have not finished: {tmp_path}/4 (failed)" in caplog.text


def test_a_policy_is_the_folder_that_was_named(tmp_path):
    for name in ("qwen-0", "qwen-0.5b", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert eval_script.policy_folder(str(tmp_path / "qwen-0.5b")).name == "qwen-0.5b"
    assert eval_script.policy_folder(str(tmp_path / "last.ckpt")).name == "last"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("compare=a/b=1,c", "compare=['a/b=1','c']"),
        ("compare=[a,c d]", "compare=['a','c d']"),
        ("compare=sweep", "compare=['sweep']"),
        ("compare=[[a,b],[c,d]]", "compare=[[a,b],[c,d]]"),
        ("task=a,b", "task=a,b"),
    ],
)
def test_a_comparison_is_typed_without_quotes(typed, meant):
    assert eval_script.as_list(typed) == meant
    if typed.startswith("compare"):
        config = compose_config(meant, "output_dir=.", name="eval")
        check_values(config)
        assert config.compare


@pytest.mark.slow
def test_compare_reads_two_real_runs_and_loads_no_model(smoke, tmp_path):
    for name in ("a", "b"):
        settings = ("callbacks=[samples]", "optim.optimizer.lr=0.03", "eval.every=1", f"seed={int(name == 'b')}")
        learned(smoke(*settings, f"output_dir={tmp_path / name}"))
    out = tmp_path / "out"
    arguments = ["eval.py", f"compare={tmp_path}/a,{tmp_path}/b", "after=1", f"hydra.run.dir={out}"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "3 problems" in done.stdout and "B - A" in done.stdout, done.stderr
    found = json.loads((out / "metrics.json").read_text())
    means = [
        pd.read_parquet(tmp_path / name / "evaluations" / "000001.parquet").groupby("item")["correct"].mean()
        for name in ("a", "b")
    ]
    assert [found["arms"][arm]["eval/accuracy"]["value"] for arm in "AB"] == pytest.approx([m.mean() for m in means])
    assert found["comparisons"][0]["difference"]["value"] == pytest.approx((means[1] - means[0]).mean())
