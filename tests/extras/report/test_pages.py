"""Pages, arms and comparisons of runs that are here already: no training and no browser."""

import http.client
import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
from conftest import EXAMPLES

from grpo.extras.report import page
from grpo.extras.report.callback import Report
from grpo.extras.report.changes import changed_problems
from grpo.extras.report.comparison import arms_of, compare
from grpo.extras.report.run import embedded
from grpo.extras.report.runs import arms, curves, load
from grpo.extras.report.serve import serve
from grpo.extras.report.sweep import line
from grpo.runs.run import Run


def copied(folder: Path, **manifest: object) -> Run:
    """Return a run in this folder with these entries of its manifest."""
    shutil.copytree(EXAMPLES / "run", folder)
    noted = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(noted | manifest))
    return Run(folder)


def judged(folder: Path, after: int, correct: list[bool], rewards: list[float] | None = None) -> Run:
    """Return a run with an evaluation of one sample of each problem."""
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    texts = [str(i) for i in range(len(correct))]
    columns = {"item": texts, "prompt": texts, "gold": texts, "completion": texts, "tokens": 1, "correct": correct}
    table = pd.DataFrame({**columns, "reward": rewards or np.array(correct, dtype=float)})
    table.to_parquet(folder / "evaluations" / f"{after:06d}.parquet")
    return Run(folder)


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
    assert {*arms([*runs, copied(tmp_path / "plain", overrides=[])])} == {"algo=dapo", "default"}
    found = curves(runs, "eval/accuracy")  # their configurations have one seed
    assert {*found["seed"]} == {"0, 0", "0, 1"}


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


def test_a_sweep_leads_to_its_runs_wherever_it_is(tmp_path):
    run = copied(tmp_path / "0")
    (tmp_path / "0" / "report.html").touch()
    assert line(run, "a", tmp_path / "report.html")["link"] == "0/report.html"


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
