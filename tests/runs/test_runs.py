"""The files of a run and their readers: the manifest, metrics.csv, samples, and several runs side by side."""

import csv
import inspect
import json
import os
import resource
import subprocess
import sys

import pandas as pd
import pytest
from conftest import ROOT, TEST_PATH, compose_config
from helpers.runs import TIMES, VARIED
from helpers.slots import Crash  # noqa: F401 - the configuration names it
from lightning.pytorch.utilities import rank_zero_only

from grpo.data.rows import fingerprint, fingerprint_of_all
from grpo.extras.report.runs import arms, curves, latest, load, table
from grpo.runs.loggers import MetricsTable
from grpo.runs.manifest import kept
from grpo.runs.run import Run
from grpo.system import files
from grpo.system.errors import UserError
from train import train

TOKEN = "hf_abcdefghijklmnopqrstuv"  # the form of a secret


class Question:
    """An object as a value of an example, as a task by somebody else may have."""

    def __init__(self, text: str) -> None:
        self.text = text


@pytest.fixture
def run(smoke, tmp_path):
    def run(name: str, *overrides: str) -> Run:
        config = compose_config(*smoke("callbacks=[samples,checkpoint]", *overrides, f"output_dir={tmp_path / name}"))
        config.task = VARIED
        train(config, overrides)
        return Run(tmp_path / name)

    return run


@pytest.mark.slow
def test_a_crashed_run_goes_on_in_its_own_folder(run, tmp_path):
    settings = ["rollout.num_rollouts=6", "eval.every=2", "callbacks.checkpoint.every=2"]
    whole = run("whole", *settings)
    with pytest.raises(RuntimeError, match="the disk is full"):
        run("crashed", *settings, "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 5}")
    crashed = Run(tmp_path / "crashed")
    assert crashed.status == "failed" and crashed.manifest["error"] == "RuntimeError: the disk is full"
    assert (crashed.manifest["rollouts"], len(crashed.metrics)) == (5, 6)  # one more than the checkpoint has

    spent = crashed.manifest["seconds"]

    resumed = run("crashed", *settings, f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")
    assert resumed.status == "finished" and resumed.manifest["error"] is None
    assert resumed.manifest["started"] == crashed.manifest["started"] and resumed.manifest["seconds"] > spent > 0
    assert list(resumed.metrics.index) == list(range(7))
    times = [name for name in TIMES if name in whole.metrics]
    pd.testing.assert_frame_equal(resumed.metrics.drop(columns=times), whole.metrics.drop(columns=times), rtol=1e-12)
    assert resumed.samples().equals(whole.samples()) and resumed.evaluations().equals(whole.evaluations())


def test_the_manifest_says_what_a_run_was_made_with(run):
    done = run("run", "seed=3")
    manifest = done.manifest
    assert (done.status, done.seed, done.overrides) == ("finished", 3, {"seed": "3"})
    assert (manifest["rollouts"], manifest["num_rollouts"]) == (2, 2)
    assert manifest["accuracy"] == done.accuracy.iloc[-1] == done.metrics["eval/accuracy"][2]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (manifest["git"] or {}).get("revision", "") == revision
    assert {"python", "torch", "transformers", "lightning"} <= manifest["versions"].keys()
    assert manifest["hardware"]["cores"] >= 1 and manifest["started"] <= manifest["ended"]
    assert {split: data["rows"] for split, data in manifest["data"].items()} == {"train": 4, "test": 3}
    assert manifest["data"]["test"]["fingerprint"] != manifest["data"]["train"]["fingerprint"]


def test_how_a_run_ended(tmp_path):
    def status(error: BaseException | None) -> str:
        try:
            with kept(str(tmp_path), [], 0, {}, dict):
                assert Run(tmp_path).status == "running"
                if error:
                    raise error
        except BaseException as raised:
            assert raised is error
        return Run(tmp_path).status

    assert [status(e) for e in (None, SystemExit(), KeyboardInterrupt(), SystemExit(1), ValueError(TOKEN))] == [
        "finished", "finished", "interrupted", "interrupted", "failed",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["error"] == "ValueError: ***"
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"status": "running", "pid": gone.pid}))
    assert Run(tmp_path).status == "stopped"
    assert Run(tmp_path / "nowhere").status == "failed"


def test_a_resumed_run_adds_to_its_seconds_and_commands(tmp_path, monkeypatch):
    before = {"seconds": 1000.0, "started": "2026-01-01T00:00:00+00:00", "commands": [["train.py"]]}
    (tmp_path / "manifest.json").write_text(json.dumps(before))
    monkeypatch.setattr("sys.argv", ["train.py", "seed=1"])
    with kept(str(tmp_path), [], 0, {}):
        assert Run(tmp_path).manifest["seconds"] == 1000.0
    manifest = Run(tmp_path).manifest
    assert 1000.0 < manifest["seconds"] < 1900.0 and manifest["started"] == before["started"]
    assert manifest["commands"] == [["train.py"], ["train.py", "seed=1"]]


def test_a_further_process_of_a_run_writes_no_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with kept(str(tmp_path), [], 0, {}) as note:
        note()
    assert not [*tmp_path.iterdir()]


def test_an_example_has_the_same_fingerprint_wherever_it_is():
    assert fingerprint({"a": 1, "b": "é"}) == fingerprint({"b": "é", "a": 1}) != fingerprint({"a": 2, "b": "é"})
    assert len(fingerprint({})) == 12
    assert fingerprint({1: {"x", "y"}, "a": Question("why")}) == fingerprint({"a": Question("why"), "1": {"y", "x"}})
    assert fingerprint({"a": Question("why")}) != fingerprint({"a": Question("how")})
    code = f"{inspect.getsource(Question)}\nfrom grpo.data.rows import fingerprint\n"
    code += "print(fingerprint({'a': {'x', 'y', 'z'}, 'b': Question('why')}))"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": TEST_PATH}
    elsewhere = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert elsewhere == fingerprint({"a": {"x", "y", "z"}, "b": Question("why")})
    rows = [{"n": i} for i in range(3000)]
    assert fingerprint_of_all(rows) == fingerprint_of_all(list(rows)) != fingerprint_of_all(rows[:-1])


def test_the_table_of_metrics(tmp_path):
    file = tmp_path / "new" / "metrics.csv"
    first = MetricsTable(str(file))
    first.log_metrics({"b": 1.5}, 0)
    first.log_metrics({"a": 2.0}, 1)
    first.log_metrics({"a": 3.0, "b": 4.0}, 2)
    assert file.read_text().split() == ["step,a,b", "0,,1.5", "1,2.0,", "2,3.0,4.0"]
    gone_back = MetricsTable(str(file))
    gone_back.log_metrics({"a": 9.0}, 2)
    gone_back.log_metrics({"c": 7.0}, 3)
    gone_back.log_metrics({"b": 5.0}, 3)  # the rest of the step
    with file.open() as lines:
        found = [[row["step"], row["a"], row["b"], row["c"]] for row in csv.DictReader(lines)]
    assert found == [["0", "", "1.5", ""], ["1", "2.0", "", ""], ["2", "9.0", "", ""], ["3", "", "5.0", "7.0"]]


def test_a_row_that_a_full_disk_did_not_take_is_written_with_the_next(tmp_path, monkeypatch):
    """A limit on the size of files stands for the full disk."""
    table, (soft, hard) = MetricsTable(str(tmp_path / "metrics.csv")), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(files, "LOST", {})
    for step, limit in enumerate((soft, 10, soft, 10)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            table.log_metrics({"a": 1.5}, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert table.file.read_text().split() == ["step,a", "0,1.5", "1,1.5", "2,1.5"] and [*files.LOST] == [
        str(table.file)
    ]
    table.finalize("success")
    assert table.file.read_text().split()[-1] == "3,1.5" and not files.LOST


def test_samples_of_some_rollouts_and_with_tokens(run):
    done = run("run", "callbacks.samples.token_logprobs=true", "rollout.num_rollouts=3")
    some = done.samples([2, 3], ["rollout", "item", "tokens", "token_ids", "rollout_logprobs"])
    assert set(some["rollout"]) == {2, 3} and len(some) == 2 * 2 * 2
    assert (some["token_ids"].str.len() == some["tokens"]).all() and (some["tokens"] > 0).all()
    assert all(
        (row < 0).all() and len(row) == n for row, n in zip(some["rollout_logprobs"], some["tokens"], strict=True)
    )
    assert done.evaluated == [0, 1, 2, 3] and set(done.evaluations([3])["rollout"]) == {3}
    asked = done.evaluations([0], ["item"])["item"]
    assert asked.is_unique and set(asked) == set(done.evaluations([3])["item"])  # the same problems
    with pytest.raises(UserError, match="has no table of \\[9\\]; it has rollouts: 1, 2, 3"):
        done.samples([9])


@pytest.mark.slow
def test_runs_side_by_side(run, tmp_path):
    """Two arms with two seeds each; the expected numbers come from the files."""
    made = [
        run(f"sweep/{i}", f"algo={algo}", f"seed={seed}", "eval.samples=2", "eval.sampling.temperature=1")
        for i, (algo, seed) in enumerate([("grpo", 0), ("grpo", 1), ("dr_grpo", 0), ("dr_grpo", 1)])
    ]
    (tmp_path / "sweep" / "10").mkdir()  # a job that failed before it began
    runs = load(tmp_path / "sweep")
    assert [r.name for r in runs] == ["0", "1", "2", "3", "10"] and runs[-1].status == "failed"
    assert {label: [r.name for r in members] for label, members in arms(runs[:4]).items()} == {
        "algo=grpo": ["0", "1"], "algo=dr_grpo": ["2", "3"],
    }  # fmt: skip
    assert list(arms(made[:2])) == ["all runs"]
    made[1].overrides |= {"preflight": "off", "preflight.skip": "[learn]"}  # which change no number
    assert list(arms(made)) == ["algo=grpo", "algo=dr_grpo"]
    for silent in (silent_runs := [Run(r.folder) for r in made]):
        silent.overrides = {}
    assert sorted(map(len, arms(silent_runs).values())) == [2, 2]  # grouped by the configuration, without folders
    found = table(runs[:4])
    assert found["last"].tolist() == [r.manifest["accuracy"] for r in made] and (found["minutes"] > 0).all()
    lengths = curves(runs, "rollout/length")
    assert len(lengths) == 4 * 2
    one = lengths[(lengths["arm"] == "algo=dr_grpo") & (lengths["seed"] == 1) & (lengths["rollouts"] == 2)]
    assert one["value"].item() == made[3].metrics["rollout/length"][2]
    asked = made[1].verdicts()["accuracy"]
    assert len(asked) == 3 and asked.mean() == pytest.approx(made[1].accuracy.iloc[-1])
    assert runs[-1].verdicts() is None
    assert latest(tmp_path).parent == tmp_path / "sweep"
    for name, text in (("empty", ""), ("head", "step,rollout/reward\n"), ("before", "step,eval/accuracy\n0,0.5\n")):
        (tmp_path / name).mkdir()  # newer runs that failed before their first rollout
        (tmp_path / name / "metrics.csv").write_text(text)
        assert Run(tmp_path / name).measured == (name == "before") and not Run(tmp_path / name).learned
        assert Run(tmp_path / name).curve("rollout/reward").empty
    assert latest(tmp_path).parent == tmp_path / "sweep"
    with pytest.raises(UserError, match=r"no run under .*head has learned from a rollout"):
        latest(tmp_path / "head")
    with pytest.raises(UserError, match=r"neither a run .* nor a sweep"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"has no metrics\.csv"):
        _ = runs[-1].metrics


def test_the_configuration_is_that_of_the_last_change(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert Run(tmp_path).config == {"seed": 0}
    (tmp_path / "config_changes.yaml").write_text("- config: {seed: 1}\n- config: {seed: 2}\n")
    assert Run(tmp_path).config == {"seed": 2}


def test_overrides_are_read_by_their_keys(tmp_path):
    (tmp_path / "manifest.json").write_text('{"overrides": ["seed=1", "++task.path=a=b", "~callbacks.samples"]}')
    assert Run(tmp_path).overrides == {"seed": "1", "task.path": "a=b", "callbacks.samples": ""}


def test_a_sample_without_a_reward_is_in_no_verdict(tmp_path):
    """Problem a has one right of two that are graded, problem b was graded nowhere. One of eval.sets has another problem a."""
    samples = {"item": ["a", "a", "a", "b"], "reward": [1.0, 0.0, None, None], "correct": [True, False, False, False]}
    samples = {name: [*column, column[0]] for name, column in samples.items()} | {"set": [None] * 4 + ["hard"]}
    pd.DataFrame(samples).to_parquet(tmp_path / "samples.parquet")
    verdicts = Run(tmp_path).verdicts()["accuracy"]
    assert verdicts["a"] == 0.5 and pd.isna(verdicts["b"])


def test_the_policy_of_a_run_is_the_best_that_it_saved(tmp_path):
    assert Run(tmp_path).policy is None
    for name in ("last", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        assert Run(tmp_path).policy == tmp_path / "checkpoints" / name
