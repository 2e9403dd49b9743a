"""Sweeps: parallel jobs, a job that fails, a sweep that is killed and resumed, and Hydra's other launchers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import hydra
import pandas as pd
import psutil
import pytest
from conftest import ROOT, compose_config
from hydra.core.hydra_config import HydraConfig

from grpo.config.composing import CONF
from grpo.extras.network import child
from grpo.extras.sweep.arms import check_arms
from grpo.extras.sweep.jobs import EARLY, Job
from grpo.extras.sweep.sweep import Sweep, is_behind, places, reported
from grpo.system.errors import UserError
from hydra_plugins.grpo import parsed, short
from train import train

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
WRITES = """if True:
    import json, pathlib, sys, time
    folder, code, jobs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    (folder / "began").write_text(str(time.time()))
    while len(list(folder.parent.glob("*/began"))) < jobs:
        time.sleep(0.05)
    time.sleep(0.5 * (jobs > 1))  # a third one would begin meanwhile
    (folder / "ended").write_text(str(time.time()))
    if code:
        print("error: it cannot be\\n")
        sys.exit(code)
    manifest = {"status": "finished", "accuracy": 0.25, "seconds": 90}
    (folder / "manifest.json").write_text(json.dumps(manifest))
"""


@pytest.fixture(autouse=True)
def no_sweep_is_left(monkeypatch):
    """For the tests of other files, whose programs would report it."""
    monkeypatch.setattr("grpo.extras.sweep.sweep.SWEEPS", [])


def make(folder: Path, at_once: int = 1) -> Sweep:
    """Return a sweep whose jobs have the overrides code=CODE jobs=JOBS: it ends when so many have begun."""

    def command(job: Job, overrides) -> list[str]:
        values = [override.partition("=")[2] for override in overrides]
        return [sys.executable, "-c", WRITES, str(job.folder), *values]

    return Sweep(folder, command, [{"PLACE": str(i)} for i in range(at_once)], "do it again")


def add(sweep: Sweep, code: int, begun: int) -> Job:
    overrides = [f"code={code}", f"jobs={begun}"]
    number = sweep.number(overrides)
    return sweep.add(Job(number, sweep.folder / str(number), overrides, " ".join(overrides), rollouts=4))


def time_of(job: Job, what: str) -> float:
    return float((job.folder / what).read_text())


def test_jobs_run_side_by_side_and_one_that_fails_does_not_stop_the_rest(tmp_path, capsys):
    sweep = make(tmp_path, at_once=2)
    jobs = [add(sweep, 0, 2), add(sweep, 3, 2), add(sweep, 0, 0)]
    sweep.run()
    assert [job.status for job in jobs] == ["finished", "failed", "finished"]
    assert time_of(jobs[1], "began") < time_of(jobs[0], "ended")
    assert time_of(jobs[2], "began") > min(time_of(job, "ended") for job in jobs[:2])  # only two jobs run at a time
    assert [job.accuracy for job in jobs] == [0.25, None, 0.25] and jobs[0].minutes == 1.5
    said = capsys.readouterr().out
    assert "sweep of 3 jobs, 2 at a time" in said and "do it again" in said
    assert f"job 1 failed: code=3 jobs=2: error: it cannot be ({jobs[1].output})" in said
    assert said.endswith("2/3 done, 1 failed\n")
    assert jobs[0].output.read_text().startswith(f"$ PLACE=0 {sys.executable} -c")


def test_a_bar_counts_the_jobs_that_are_left(tmp_path, monkeypatch):
    bars = []

    class Screen:
        console = None

        @contextmanager
        def busy(self, words, total):
            bars.append([words, total, 0])
            yield lambda: bars[-1].__setitem__(2, bars[-1][2] + 1)

    monkeypatch.setattr("grpo.system.output.console.SCREENS", [Screen()])
    sweep = make(tmp_path)
    for code in (0, 3):
        add(sweep, code, 0)
    add(sweep, 0, 1).status = "finished"
    sweep.run()
    assert bars == [["jobs of the sweep", 2, 2]]


def test_a_second_call_runs_what_is_not_finished(tmp_path):
    first = make(tmp_path)
    done, failed = add(first, 0, 0), add(first, 1, 0)
    first.run()
    before = (done.folder / "began").stat().st_mtime_ns
    first.lock.close()

    (failed.folder / "left").touch()
    (failed.folder / "manifest.json").write_text('{"status": "failed"}')
    second = make(tmp_path)
    again = [add(second, 1, 0), add(second, 0, 1), add(second, 0, 0)]  # in another order, and a new one
    assert [job.number for job in again] == [1, 2, 0] and again[2].status == "finished"
    second.run()
    assert [job.status for job in again] == ["failed", "finished", "finished"]
    assert (done.folder / "began").stat().st_mtime_ns == before
    assert (tmp_path / "stopped" / "1" / "left").exists() and not (failed.folder / "left").exists()
    assert second.number(["jobs=1", "code=0"]) == 2  # however it is ordered
    second.forget([])  # too late
    assert second.jobs == again
    assert json.loads((tmp_path / "jobs.json").read_text()) == [
        ["code=0", "jobs=0"], ["code=1", "jobs=0"], ["code=0", "jobs=1"],
    ]  # fmt: skip


def test_a_job_goes_on_from_its_checkpoint_and_without_one_it_starts_anew(tmp_path):
    folder = tmp_path / "0, a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "00002.ckpt").mkdir()
    job = Job(0, folder, ["seed=1", "ckpt_path=x"], "seed=1", rollouts=4)
    assert job.arguments() == ["seed=1", f"ckpt_path='{folder}'", "resume.auto=true"]
    shutil.rmtree(folder / "checkpoints")
    for _ in range(2):  # what was stopped before makes room
        folder.mkdir(exist_ok=True)
        (folder / "output.txt").touch()
        assert job.arguments() == ["seed=1", "ckpt_path=x"] and not folder.exists()
    assert (tmp_path / "stopped" / folder.name / "output.txt").exists()
    folder.mkdir()
    assert Job(0, folder, ["run=x"], "").arguments() == ["run=x"] and folder.exists()  # an evaluation goes on in it


def test_the_output_of_a_job_goes_on_without_its_secrets(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    sweep = Sweep(tmp_path, lambda _, words: [sys.executable, "-c", "print('after')", *words], [{}], "do it again")
    job = sweep.add(Job(0, tmp_path / "0", ["logger.wandb.api_key=abcdefgh1234"], ""))
    (job.folder / "checkpoints" / "00002.ckpt").mkdir(parents=True)
    job.output.write_text("before\n")
    sweep.run()
    first, command, last = job.output.read_text().splitlines()
    assert (first, last) == ("before", "after") and "logger.wandb.api_key=" in command and "abcdefgh" not in command
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_sweeper_raises_is_raised_after_the_table(monkeypatch):
    monkeypatch.setattr("grpo.extras.sweep.sweep.SWEEPS", [])
    with pytest.raises(RuntimeError, match="no trial"), reported():
        raise RuntimeError("no trial")


def test_places():
    assert places("auto", ["3", "GPU-1"], {}) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}]
    assert places(3, ["0", "1"], {})[2] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert places("auto", [], {}) == [{}] and places(2, [], {"OMP_NUM_THREADS": "7"}) == [{}, {}]
    assert places(2, [], {}) == [{"OMP_NUM_THREADS": str(max(1, os.cpu_count() // 2))}] * 2
    for wrong in (0, "many", 1.5):
        with pytest.raises(UserError, match=f"hydra.launcher.jobs={wrong} must be auto or an integer"):
            places(wrong, [], {})


def test_a_job_is_behind_whose_accuracy_is_below_the_median_after_as_many_rollouts():
    others = [{0: 0.3, 10: 0.4}, {0: 0.3, 10: 0.6, 20: 0.9}, {0: 0.3, 10: 0.7}]  # the median after 10 is 0.6
    assert is_behind({0: 0.3, 10: 0.59}, others, 3)
    assert not is_behind({0: 0.3, 10: 0.6}, others, 3)
    assert not is_behind({0: 0.3, 10: 0.59}, others, 4) and not is_behind({0: 0.1}, others, 1)
    assert is_behind({10: 0.9, 20: 0.89}, others, 1) and not is_behind(
        {20: 0.89}, others, 2
    )  # one other has been there


LEARNS = """if True:
    import json, pathlib, sys, time
    folder, accuracy = pathlib.Path(sys.argv[1]), sys.argv[2]
    (folder / "metrics.csv").write_text(f"step,eval/accuracy,loss/kl\\n0,0.3,\\n1,,0.1\\n2,{accuracy},0.1\\n")
    time.sleep(0 if accuracy > "0.5" else 300)
    (folder / "manifest.json").write_text(json.dumps({"status": "finished", "accuracy": float(accuracy)}))
"""


def test_a_search_stops_a_job_that_falls_behind_and_a_resumed_one_leaves_it(tmp_path, capsys):
    """Jobs with 0.6 and 0.8 after 2 of 4 rollouts finish, so that the median is 0.7; that with 0.4 would go on for 300 s."""

    def command(job: Job, overrides) -> list[str]:
        return [sys.executable, "-c", LEARNS, str(job.folder), *overrides]

    for begins in (True, False):
        sweep = Sweep(tmp_path, command, [{}], "do it again", prune=2)
        jobs = [sweep.add(Job(i, tmp_path / str(i), [f"0.{a}"], f"0.{a}", rollouts=4)) for i, a in enumerate((6, 8, 4))]
        sweep.run()
        sweep.lock.close()
        assert [(job.status, job.accuracy) for job in jobs] == [("finished", 0.6), ("finished", 0.8), (EARLY, 0.4)]
        out = capsys.readouterr().out
        assert ("job 2 stopped early: 0.4: accuracy 40.0 %; 2/3 done, 1 stopped early" in out) == begins
        assert ("job 2 begins" in out) == begins


def test_a_job_is_compared_with_finished_ones_and_may_learn_all_that_it_has_learned(tmp_path):
    """The finished ones had 0.6 and 0.8 after 2 rollouts; a failed one had 0.1, with which the median would be 0.6."""
    sweep = Sweep(tmp_path, None, [{}], "", prune=2)
    for i, (status, accuracy) in enumerate((("finished", 0.6), ("finished", 0.8), ("failed", 0.1), ("running", 0.65))):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "metrics.csv").write_text(f"step,eval/accuracy\n0,0.9\n2,{accuracy}\n")
        sweep.jobs.append(Job(i, tmp_path / str(i), [], "", rollouts=4, status=status))
    job = sweep.jobs[-1]
    assert sweep.falls_behind(job)
    job.rollouts = 2  # it is about to end
    assert not sweep.falls_behind(job)
    job.status = EARLY
    assert job.accuracy == 0.65  # the last, not that before training
    sweep.lock.close()


def test_a_table_is_advised_where_runs_can_be_compared(tmp_path, capsys):
    """Two jobs that kept no samples of their evaluations."""
    sweep = make(tmp_path)
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "config.yaml").write_text(f"seed: {seed}\ntask: {{}}\n")
        (tmp_path / str(seed) / "manifest.json").write_text('{"status": "finished"}')
        (tmp_path / str(seed) / "metrics.csv").write_text("step,eval/accuracy\n4,0.5\n")
        sweep.jobs.append(Job(seed, tmp_path / str(seed), [], "", 4, "finished"))
    sweep.report()
    assert capsys.readouterr().out == f"written to {tmp_path}/report.html\n"


def test_how_far_a_sweep_is_is_told(tmp_path):
    sweep = make(tmp_path)
    sweep.jobs = [
        Job(i, tmp_path, [], "", 4, status) for i, status in enumerate(("finished", "failed", "running", "waiting"))
    ]
    assert sweep.total() == "1/4 done, 1 failed, 1 running"
    sweep.planned = 6  # a search chooses the others later
    assert sweep.total() == "1/6 done, 1 failed, 1 running"


def test_the_label_of_a_job_has_no_more_digits_than_people_read():
    words = ["optim.optimizer.lr=0.00020554062603827", "rollout.group_size=4", "algo=dapo", "+x=0.5", "seed=123456"]
    labels = ["optim.optimizer.lr=0.0002055", "rollout.group_size=4", "algo=dapo", "+x=0.5", "seed=123456"]
    assert [short(override) for override in parsed(words).values()] == labels


def test_a_sweep_that_is_refused_leaves_nothing_that_it_has_made(tmp_path):
    sweep = make(tmp_path / "sweep")
    sweep.add(Job(sweep.number(["seed=0"]), tmp_path / "sweep" / "0", [], ""))
    before = sweep.numbered()
    sweep.number(["seed=1"])
    sweep.forget(before)
    assert sweep.numbered() == before == [["seed=0"]] and not sweep.jobs
    sweep.forget([])
    assert not sweep.folder.exists()


def test_an_arm_that_cannot_be_is_named_before_the_first_job():
    arms = {
        "algo.num_minibatches=4": compose_config("output_dir=.", "algo.num_minibatches=4"),
        "rollout.group_size=1": compose_config("output_dir=.", "rollout.group_size=1"),
        "eval.samples=2": compose_config("output_dir=.", "eval.samples=2"),
        "model.path=/no/folder": compose_config("output_dir=.", "model=path", "model.path=/no/folder"),
    }
    good = arms["algo.num_minibatches=4"]
    check_arms({"as it is": good, "once more": good})
    later = compose_config("output_dir=.", "rollout.group_size=${oc.env:NOBODY_HAS_SET_THIS}")  # known only in the job
    for label, part in {
        "rollout.group_size=1": "rollout.group_size=1: advantages compare the samples",
        "eval.samples=2": "eval.samples=2 at temperature 0",
        "model.path=/no/folder": "model.path=/no/folder is neither a local folder nor",
    }.items():
        with pytest.raises(UserError) as refusal:
            check_arms({"as it is": good, "later": later, label: arms[label]})
        assert str(refusal.value).startswith(f"the arm {label} cannot run, and no job has begun: {part}")


AT_WORK = """if True:
    import sys
    from pathlib import Path
    from grpo.extras.sweep.jobs import Job
    from grpo.extras.sweep.sweep import Sweep
    sleeps = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'began').touch(); time.sleep(3600)"
    folder = Path(sys.argv[1])
    sweep = Sweep(folder, lambda job, _: [sys.executable, "-c", sleeps, str(job.folder)], [{}, {}], "do it again")
    for name in "01":
        sweep.add(Job(int(name), folder / name, [], ""))
    sweep.run()
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_their_sweep_and_nobody_comes_between(tmp_path, kind):
    sweep = subprocess.Popen([sys.executable, "-c", AT_WORK, tmp_path], cwd=ROOT, env=ENVIRONMENT)
    try:
        wait_for(lambda: all((tmp_path / name / "began").exists() for name in "01"))
        processes = psutil.Process(sweep.pid).children(recursive=True)
        assert len(processes) == 4  # two jobs, each with a guard process
        with pytest.raises(UserError, match="another sweep or its last jobs are still running in"):
            make(tmp_path)
    finally:
        sweep.send_signal(kind)
        assert sweep.wait(120) == (143 if kind == signal.SIGTERM else -9)
    assert not psutil.wait_procs(processes, timeout=child.GRACE + 100)[1]
    make(tmp_path)


def wait_for(condition, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- through train.py


@pytest.mark.parametrize(
    ("program", "place"), [("train", "sweep"), pytest.param("eval", "eval-sweep", marks=pytest.mark.slow)]
)
def test_a_sweep_has_a_folder_with_its_task_and_time(program, place, tmp_path, monkeypatch):
    """One that names no folder itself."""
    folders = []
    monkeypatch.setattr(Sweep, "run", lambda sweep: folders.extend(job.folder for job in sweep.jobs))
    monkeypatch.setattr("grpo.extras.sweep.sweep.SWEEPS", [])
    monkeypatch.setattr("grpo.extras.sweep.arms.CHECKED", {})
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr("sys.argv", [f"{program}.py", "-m", "task=sums", "seed=3", "hydra/hydra_logging=none"])
    monkeypatch.chdir(tmp_path)
    hydra.main(version_base="1.3", config_path=str(CONF), config_name=program)(lambda config: None)()
    (folder,) = folders
    assert re.fullmatch(rf"outputs/sums/{place}/[\d-]{{10}}_[\d-]{{8}}/0", str(folder))


def sweep_command(smoke, folder: Path, *overrides: str) -> list[str]:
    own = ("output_dir", "optim.optimizer.lr")  # Optuna chooses the second
    fixed = [override for override in smoke("logger=csv") if not override.startswith(own)]
    return [sys.executable, "train.py", "-m", *fixed, *overrides, f"hydra.sweep.dir={folder}"]


def status(job: Path) -> str | None:
    file = job / "manifest.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


@pytest.mark.slow
def test_a_sweep_that_is_killed_is_gone_on_with(smoke, tmp_path):
    """Jobs 1 and 3 fail, since no prompt fits their limit. When the sweep is killed, job 0 has finished and job 2 has not."""
    settings = ["callbacks=[checkpoint]", "callbacks.checkpoint.every=1", "eval.every=3"]
    folder = tmp_path / "sweep"
    swept = ["rollout.num_rollouts=1,12", "prompt_limit.max_tokens=null,3"]
    command = sweep_command(smoke, folder, *settings, *swept, "hydra.launcher.jobs=2")
    first = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: (folder / "2/checkpoints/last.ckpt").exists() and status(folder / "0") == "finished")
        left = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.kill()
        first.wait()
    assert left and not psutil.wait_procs(left, timeout=child.GRACE + 100)[1]
    assert status(folder / "2") != "finished"
    before = (folder / "0/metrics.csv").stat().st_mtime_ns

    other = subprocess.run([*command, "seed=7"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert other.returncode == 1 and other.stderr == (
        f"error: {folder} has another sweep: its job 0 has no seed, this one seed=7; set hydra.sweep.dir to a new folder\n"
    )
    again = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert again.returncode == 1
    failed = [f"{job} ({folder}/{job}/output.txt)" for job in (1, 3)]
    assert again.stderr == f"error: 2 of the sweep's 4 jobs failed: {', '.join(failed)}\n"
    assert "sweep of 4 jobs, 1 of them finished before, 2 at a time" in again.stdout
    assert (
        "job 1 failed: rollout.num_rollouts=1 prompt_limit.max_tokens=3: error: the prompt of train example 1"
        in again.stdout
    )
    assert f"written to {folder}/report.html" in again.stdout and (folder / "report.html").exists()
    assert (folder / "0/metrics.csv").stat().st_mtime_ns == before
    assert [status(folder / name) for name in "02"] == ["finished"] * 2 and (folder / "multirun.yaml").exists()
    assert f"resuming {folder}/2\n" in (folder / "2/output.txt").read_text()

    # job 0 was killed after its last checkpoint
    (folder / "0/manifest.json").write_text(
        json.dumps(json.loads((folder / "0/manifest.json").read_text()) | {"status": "running"})
    )
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT)
    assert (folder / "0/metrics.csv").stat().st_mtime_ns == before and status(folder / "0") == "finished"
    assert not (folder / "stopped/0").exists()

    own = [
        override
        for override in smoke("logger=csv", *settings, "rollout.num_rollouts=12")
        if "optimizer" not in override
    ]
    train(compose_config(*own))
    resumed, straight = (pd.read_csv(run / "metrics.csv", index_col="step") for run in (folder / "2", tmp_path))
    measured = [name for name in straight if not name.startswith(("time/", "memory/", "tokens/"))]
    assert list(resumed.index) == list(range(13)) and "eval/accuracy" in measured
    pd.testing.assert_frame_equal(resumed[measured], straight[measured], check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_run_jobs_and_tell_failures(smoke, tmp_path, launcher):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    command = sweep_command(smoke, tmp_path, "rollout.group_size=1,2", f"hydra/launcher={launcher}")
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "error: rollout.group_size=1: advantages compare" in done.stderr.splitlines()[-1]
    assert [status(tmp_path / name) for name in "01"] == [None, "finished"]


@pytest.mark.slow
def test_optuna_asks_our_launcher_and_bears_a_failure(smoke, tmp_path):
    """A second call chooses the same points, so only failed jobs run again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    settings = ["sweep=optuna", "hydra.sweeper.n_trials=3", "rollout.group_size=choice(1,2)", "hydra.launcher.jobs=2"]
    command = sweep_command(smoke, tmp_path, *settings)
    first = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    bad = [number for number, job in enumerate(jobs) if "rollout.group_size=1" in job]
    assert len(jobs) == 3 and 0 < len(bad) < 3
    assert "sweep of 3 jobs, 2 at a time" in first.stdout and "A new study created" not in first.stdout + first.stderr
    assert first.returncode == 1 and f"error: {len(bad)} of the sweep's 3 jobs failed: {bad[0]} " in first.stderr
    again = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert json.loads((tmp_path / "jobs.json").read_text()) == jobs
    for number in range(3):
        assert (f"job {number} begins" in again.stdout) == (number in bad)
