"""Pages, arms and comparisons of runs that are here already: no training and no browser."""

import http.client
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import EXAMPLES

from grpo.extras.report import page, part, write_report
from grpo.extras.report.callback import Report
from grpo.extras.report.changes import changed_problems
from grpo.extras.report.comparison import arms_of, compare
from grpo.extras.report.folder import answers, curves_of, folder_data, line
from grpo.extras.report.run import embedded
from grpo.extras.report.runs import arms, curves, differences, in_digits, load
from grpo.extras.report.serve import answer, serve
from grpo.runs.run import Run
from grpo.system.errors import UserError

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node")


def copied(folder: Path, **manifest: object) -> Run:
    """Return a run in this folder with these entries of its manifest."""
    shutil.copytree(EXAMPLES / "run", folder)
    noted = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(noted | manifest))
    return Run(folder)


def composed(folder: Path, config: dict, *typed: str, **choices: str) -> Run:
    """Return a run that has only settings, what was typed, and what was chosen."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"output_dir": str(folder), "rollout": {}} | config))
    (folder / "manifest.json").write_text(json.dumps({"status": "finished", "overrides": typed}))
    (folder / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    return Run(folder)


def judged(folder: Path, after: int, correct: list[bool], rewards: list[float] | None = None) -> Run:
    """Return a run with an evaluation of one sample of each problem."""
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    texts = [str(i) for i in range(len(correct))]
    columns = {"item": texts, "prompt": texts, "gold": texts, "completion": texts, "tokens": 1, "correct": correct}
    table = pd.DataFrame({**columns, "reward": rewards or np.array(correct, dtype=float)})
    table.to_parquet(folder / "evaluations" / f"{after:06d}.parquet")
    return Run(folder)


def in_script(data: dict, expression: str) -> object:
    """Return the value of an expression in the script of a page with this data."""
    parts = [part(name) for name in ("charts.js", "timeline.js", "samples.js", "folder.js")]
    before = f"const data = {json.dumps(data)}, location = {{}};"
    script = "\n".join([before, *parts, f"console.log(JSON.stringify({expression}))"])
    made = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True)
    return json.loads(made.stdout)


def test_jobs_come_in_the_order_of_their_numbers_and_those_that_run_are_not_compared(tmp_path):
    for job in range(11):
        (tmp_path / str(job)).mkdir()
        (tmp_path / str(job) / "config.yaml").write_text(f"seed: {job}\nlr: {job // 6}\n")
        (tmp_path / str(job) / "manifest.json").write_text(json.dumps({"status": "failed" if job == 2 else "finished"}))
    assert [run.seed for run in load(tmp_path)] == [*range(11)]
    found = arms_of([str(tmp_path)])
    assert [[run.seed for run in runs] for runs in found.values()] == [[0, 1, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_the_difference_is_that_of_the_later_run_from_the_first(tmp_path):
    named = {"a": [judged(tmp_path / "a", 0, [False] * 4)], "b": [judged(tmp_path / "b", 0, [True] * 3 + [False])]}
    (one,) = compare(named)["comparisons"]
    assert (one["difference"]["value"], one["better"], one["worse"], one["ties"]) == (0.75, 3, 0, 1)


def test_a_run_without_settings_or_overrides_tells_no_arms_apart(tmp_path):
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "manifest.json").write_text('{"status": "failed"}')
    runs = [copied(tmp_path / name, overrides=["algo=dapo", f"seed={name}"]) for name in "01"]
    assert {*arms([*runs, Run(tmp_path / "failed")])} == {"all runs"}
    assert {*arms([*runs, copied(tmp_path / "plain", overrides=[])])} == {"all runs"}  # its settings are the same
    found = curves(runs, "eval/accuracy")  # their configurations have one seed
    assert {*found["seed"]} == {"0, 0", "0, 1"}


def test_what_differs_is_what_was_composed_not_what_was_typed(tmp_path):
    """The same learning rate typed and by default, other seeds and folders, and two options with the same content."""
    made = {"optim": {"lr": 1e-4}}
    one = composed(tmp_path / "a", made | {"seed": 0, "engine": {"path": f"{tmp_path}/a/last"}}, algo="grpo")
    other = made | {"seed": 1, "data_seed": 1, "engine": {"path": f"{tmp_path}/b/last"}, "report": "live"}
    two = composed(tmp_path / "b", other, "optim.lr=1e-4", "seed=1", algo="like_grpo")
    assert differences([one, two]) == [] and {*arms([one, two])} == {"all runs"}


def test_runs_on_other_problems_are_other_arms(tmp_path):
    runs = [composed(tmp_path / f"{seed}", {"seed": seed, "task": {"seed": seed // 2}}) for seed in range(4)]
    assert {arm: [run.seed for run in some] for arm, some in arms(runs).items()} == {
        "task.seed=0": [0, 1], "task.seed=1": [2, 3],
    }  # fmt: skip


@needs_node
def test_a_comparison_says_where_few_problems_are_in_common():
    """Arm a has 4 problems; b shares 1 of its 3 with it, c's seeds share none of 5, d is beyond those that are compared."""
    named = [{"label": "a", "seeds": 1, "n": 4, "asked": 4}, {"label": "b", "seeds": 1, "n": 3, "asked": 3}]
    named += [{"label": "c", "seeds": 2, "asked": 5}, {"label": "d", "seeds": 1, "n": 4, "asked": 4}]
    rows = [one | {"arm": arm} for arm, one in enumerate(named)]
    rows[1] |= {"p": 1, "better": 1, "worse": 0, "ties": 0}
    said = in_script({"arms": named, "compared": 3}, f"(rows => fewInCommon(rows, rows[0]))({json.dumps(rows)})")
    assert said == [
        "b and a have only 1 of 4 problems in common.",
        "The seeds of c have no problem in common.",
        "The page compares the first 3 arms alone.",
    ]


def test_an_option_stands_for_the_settings_that_it_explains_and_hides_no_other(tmp_path):
    """dapo changes algo.low and the selection; the rate was typed beside it; two unchosen keys differ alike."""
    runs = []
    for name, algo, rate, old in (("a", "grpo", 1e-4, 1), ("b", "dapo", 2e-4, 1), ("c", "dapo", 2e-4, 2)):
        low, select = (0.2, None) if algo == "grpo" else (0.3, "varied")
        config = {"algo": {"low": low}, "select": select, "optim": {"lr": rate}, "new": {"x": old, "y": 10 * old}}
        runs.append(composed(tmp_path / name, config, f"optim.lr={rate}", algo=algo))
    found = {one.name: (one.also, [*one.values.values()]) for one in differences(runs)}
    assert found == {
        "algo": (["algo.low", "select"], ["grpo", "dapo", "dapo"]),
        "optim.lr": ([], [1e-4, 2e-4, 2e-4]),
        "new.x": (["new.y"], [1, 1, 2]),
    }
    assert list(arms(runs)) == [f"algo={algo}, optim.lr={rate}, new.x={x}"
        for algo, rate, x in (("grpo", "1e-4", 1), ("dapo", "2e-4", 1), ("dapo", "2e-4", 2))]  # fmt: skip


SPELLED = {5e-5: "5e-5", 0.00015: "1.5e-4", -2e-7: "-2e-7", 0.001: "0.001", 0.5: "0.5", 0.0: "0", 3: "3", True: "true"}


def test_labels_have_as_many_digits_as_tell_arms_apart(tmp_path):
    """A search draws rates of 17 digits; two arms must never become one."""
    drawn = {"far": [0.00020554062603827, 0.00013252449072696866], "near": [0.00020554062, 0.00020554061]}
    labels = {}
    for name, rates in drawn.items():
        runs = [composed(tmp_path / name / str(i), {"lr": rate}, f"lr={rate}") for i, rate in enumerate(rates)]
        labels[name] = [*arms(runs)]
    assert labels == {"far": ["lr=2.055e-4", "lr=1.325e-4"], "near": ["lr=2.0554062e-4", "lr=2.0554061e-4"]}


@needs_node
def test_a_small_number_is_spelled_alike_in_tables_and_labels():
    assert in_script({}, f"[{','.join(map(json.dumps, SPELLED))}].map(asText)") == [*SPELLED.values()]
    assert [in_digits(value) for value in SPELLED][:-1] == [*SPELLED.values()][:-1]
    assert in_script({}, "[1e-7, 1.5e-7, 1.234e-7, 1e-10].map((value) => tell(value))") == [
        "1e-7",
        "1.5e-7",
        "1.23e-7",
        "1e-10",
    ]


def test_a_page_counts_the_jobs_that_have_not_begun(tmp_path):
    """Three jobs were planned, and one has a folder."""
    sweep = tmp_path / "sweep"
    composed(sweep / "0", {"seed": 0})
    (sweep / "jobs.json").write_text('[["seed=0"], ["seed=1"], ["seed=2"]]')
    for folder in (sweep, tmp_path):
        assert {"label": "jobs", "value": "2", "note": "have not begun"} in folder_data(folder, 10, None)["numbers"]
    composed(sweep / "1", {"seed": 1})
    composed(sweep / "2", {"seed": 2})
    assert [one["label"] for one in folder_data(sweep, 10, None)["numbers"]] == ["arms", "runs"]


def test_a_folder_holds_its_runs_their_comparisons_and_their_answers(tmp_path):
    """Two arms; one of them has a seed twice, of which the newer run counts. And an evaluation, which has no page."""
    verdicts = {"a": [False] * 4, "b": [True, True, True, False], "c": [False] * 4}
    for name, right in verdicts.items():
        run = composed(tmp_path / name, {"lr": 1 if name == "a" else 2, "seed": 0})
        noted = run.manifest | {"started": f"2026-11-22T21:3{'acb'.index(name)}:17", "rollouts": 2}
        (run.folder / "manifest.json").write_text(json.dumps(noted))
        (run.folder / "metrics.csv").write_text(f"step,eval/accuracy\n0,0\n2,{sum(right) / 4}\n")
        judged(run.folder, 2, right)
    evaluation = tmp_path / "eval" / "2026-11-22_21-40-17"
    evaluation.mkdir(parents=True)
    (evaluation / "config.yaml").write_text("{model: {path: a/checkpoints/best}, compare: null}")
    (evaluation / "metrics.json").write_text('{"eval/accuracy": {"value": 0.25, "low": 0.1, "high": 0.5, "n": 4}}')
    data = folder_data(tmp_path, 6, tmp_path / "report.html")
    assert [(run["name"], run["arm"], run["values"], run["accuracy"]) for run in data["runs"]] == [
        ("b", 0, [2], 0.75), ("c", 0, [2], 0.0), ("a", 1, [1], 0.0),
    ]  # fmt: skip
    assert [(arm["label"], arm["seeds"], arm["value"]) for arm in data["arms"]] == [("lr=2", 1, 0.75), ("lr=1", 1, 0.0)]
    assert [(arm["n"], arm["asked"]) for arm in data["arms"]] == [(4, 4), (4, 4)]
    assert [arm["after"] for arm in data["arms"]] == [[2], [2]]
    (pair,) = data["pairs"].items()
    assert pair[0] == "0 1" and (pair[1]["difference"], pair[1]["worse"], pair[1]["p"]) == (-0.75, 3, 0.25)
    assert [(one["item"], [said["correct"] for said in one["said"].values()]) for one in data["problems"]] == [
        ("0", [True, False, False]), ("1", [True, False, False]),
    ]  # fmt: skip
    assert data["asked"] == 4 and data["prediction"] is None  # two accuracies are no curve
    (made,) = data["evaluations"]
    assert (made["name"], made["of"], made["problems"], made["accuracy"]) == (
        "eval/2026-11-22_21-40-17", "a/checkpoints/best", 4, 0.25,
    )  # fmt: skip
    with pytest.raises(UserError, match="-17 is an evaluation, which has no page: its numbers are in metrics"):
        write_report(evaluation)


def test_answers_side_by_side_show_the_picture_of_their_problem(tmp_path):
    run = judged(tmp_path, 2, [True])
    file = tmp_path / "evaluations" / "000002.parquet"
    messages = json.dumps(
        [{"role": "user", "content": [{"type": "image", "image": "ab12"}, {"type": "text", "text": "How many?"}]}]
    )
    pd.read_parquet(file).assign(prompt="<image>How many?", messages=messages, turns=1).to_parquet(file)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "ab12.jpg").write_bytes(b"jpeg")
    found = answers([run], 5)
    assert found["problems"][0]["pictures"] == ["ab12"] and found["pictures"] == {
        "ab12": "data:image/jpeg;base64,anBlZw=="
    }


@needs_node
def test_an_image_that_is_a_word_or_of_a_shortened_prompt_is_no_picture():
    texts = [("a<image>b", []), ("a<image>b", ["x"]), ("<image>[... 5 characters left out ...]b", ["x", "y"])]
    texts += [("a<image>b<image>c", ["x", "y"], 1, 9)]
    assert in_script({"pictures": {}}, f"{json.dumps(texts)}.map((said) => withPictures(...said))") == [
        ["a<image>b"], ["a", "[picture x]", "b"], ["<image>[... 5 characters left out ...]b"],
        ["", "[picture x]", "b"],
    ]  # fmt: skip


@needs_node
def test_a_condition_is_true_of_known_values_alone():
    words = ["accuracy<0.5", "accuracy!=0.5", "accuracy=\N{EN DASH}", "accuracy<=0.2"]
    column = "[{name: 'accuracy', of: (run) => run.accuracy}]"
    found = in_script(
        {}, f"{json.dumps(words)}.map((w) => [0.2, null].map((accuracy) => passes({{accuracy}}, w, {column})))"
    )
    assert found == [[True, False], [True, True], [False, False], [True, False]]


@needs_node
def test_a_mean_is_over_one_run_of_each_seed_that_all_reach_its_points():
    """Seed 0 has a finished run and a newer one without curves; seed 1 goes on after 12; seed 2 has failed after 3."""
    said = [("running", 0, []), ("running", 1, [0, 10, 12]), ("finished", 0, [0, 10, 17]), ("failed", 2, [0, 3])]
    runs = [
        {"status": how, "seed": seed, "curves": {"x": x, "y": {"m": [seed + at for at in x]}}} for how, seed, x in said
    ]
    data = {"about": {}, "t": []}
    assert in_script(data, f"seedsOf({json.dumps(runs)}).map((run) => run.curves.x)") == [[0, 10, 17], [0, 10, 12]]
    mean = in_script(data, f"over(seedsOf({json.dumps(runs)}), 'm')")
    assert (mean["x"], mean["y"]) == ([0, 10], [0.5, 10.5])
    assert in_script(data, f"over(seedsOf({json.dumps(runs[3:])}), 'm').x") == [0, 3]


def test_a_long_curve_has_fewer_points_on_the_page_of_all_runs_but_evaluations_between():
    table = pd.DataFrame(
        {"rollout/reward": range(11), "eval/accuracy": [0.5 if at == 7 else np.nan for at in range(11)]}
    )
    assert curves_of(table, 5)["x"] == [0, 5, 7, 10] and curves_of(table[:10], 5)["x"] == [0, 5, 7, 9]
    rewards = curves_of(table, 5)["y"]["rollout/reward"]  # an evaluation between the points is of eval/ alone
    assert np.isnan(rewards[2]) and list(rewards[[0, 1, 3]]) == [0, 5, 10]
    assert curves_of(table.assign(**{"eval/accuracy": 0.5}), 5)["x"] == [0, 4, 5, 9, 10]


def test_a_sample_without_a_reward_is_no_change(tmp_path):
    judged(tmp_path, 0, [False, False])
    found = changed_problems(judged(tmp_path, 2, [True, True], [1.0, float("nan")]))
    assert (found["of"], found["better"], found["worse"]) == (1, 1, 0)


def test_all_kinds_of_samples_share_the_room_of_a_page():
    run = Run(EXAMPLES / "run")
    for budget in (8, 12):
        assert sum(len(step["samples"]) for step in embedded(run, budget)["steps"]) <= budget


def test_no_text_of_a_run_ends_the_script_of_the_page():
    text = page({"name": "a", "completion": "</script><script>alert(1)</script>"})
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["completion"] == "</script><script>alert(1)</script>"


def test_the_server_shows_the_runs_of_its_folder_to_this_machine(tmp_path):
    copied(tmp_path / "runs" / "a")
    copied(tmp_path / "other")
    server = serve(tmp_path / "runs", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = [
        ("a/report.html", "localhost", 200),
        ("a/report.html", "127.0.0.1:80", 200),
    ]  # a browser leaves out port 80
    asked += [("a/report.html", "example.org", 403), ("../other/report.html", "localhost", 404)]
    try:
        for path, host, status in asked:
            request = http.client.HTTPConnection("127.0.0.1", server.server_port)
            request.request("GET", f"/{path}", headers={"Host": host})
            assert request.getresponse().status == status, (path, host)
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_without_a_page_yet_is_answered_with_a_page_that_loads_itself_again(tmp_path):
    """A run that has just begun, at / and in its folder; then one whose metrics are half written, and an evaluation."""
    started = composed(tmp_path / "a<b", {"task": None}).folder
    for root, path in ((started, "/"), (tmp_path, "/a%3Cb/report.html")):
        status, text = answer(root, path)
        assert status == 503 and 'http-equiv="refresh" content="10"' in text
        assert "a&lt;b has no metrics.csv with a row" in text
    (started / "metrics.csv").write_text("epoch\n0\n")
    assert "KeyError" in answer(started, "/")[1]
    (started / "config.yaml").write_text("{model: {path: x}}")
    assert "is an evaluation, which has no page" in answer(started, "/")[1]


def test_a_sweep_leads_to_its_runs_wherever_it_is(tmp_path):
    run = copied(tmp_path / "0")
    (tmp_path / "0" / "report.html").touch()
    assert line(run, tmp_path, tmp_path / "report.html")["link"] == "0/report.html"


def test_the_page_of_a_failed_run_says_what_ended_it(tmp_path):
    run = copied(tmp_path / "run", status="running", ended=None)
    Report(str(run.folder)).on_exception(None, None, RuntimeError("the disk is full"))
    text = (run.folder / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["status"] == "failed" and "the disk is full" in data["error"]


def test_a_live_page_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.extras.report.callback.write_report", lambda *_, **__: time.sleep(0.3))
    report, before = Report(str(tmp_path), when="live"), time.monotonic()
    report.on_train_batch_end(None, None)
    assert report.due - before >= 0.3 + 20 * 0.3
