"""Two ranks, one of which gets a signal in the middle of its work: both end at once, and the resumed run equals a straight one.

The work that the signal meets would last for an hour on both ranks, so an end shows that it was not waited for.
"""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import EXAMPLES, TEST_PATH
from helpers.programs import command
from helpers.runs import rows, state
from helpers.slots import Varied

from grpo.runs.run import Run

SETTINGS = """task._target_=test_stop_ranks.Asks callbacks=[samples,checkpoint] callbacks.checkpoint.every=3 rollout.prompts=2
    rollout.group_size=4 rollout.num_rollouts=3 eval.samples=4 eval.sampling.temperature=1 resume=auto resume.changes=allow
    trainer=cpu trainer.devices=2""".split()


class Asks(Varied):
    """Sends a signal to the process of `rank`, once, while it scores its answer number at[rank]; then that answer takes an hour,
    and so does answer at[other] of the other rank, or that rank is stopped. folder: remembers that this was so.
    alone: the signal does not wait until the other rank is at its answer."""

    def __init__(self, at=(), rank=0, folder=".", stops=False, alone=False, **options) -> None:
        super().__init__(**options)
        self.stops, self.alone = stops, alone or len(at) < 2
        self.me, self.at, self.rank, self.folder, self.scored = (
            int(os.environ.get("LOCAL_RANK", "0")),
            at,
            rank,
            folder,
            0,
        )

    def score(self, example, trajectory):
        self.scored += 1
        asked = Path(self.folder, f"asked-{self.me}")
        if self.at and self.scored == self.at[self.me] and not asked.exists():
            asked.touch()
            if self.stops and self.me != self.rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.me == self.rank:
                while not self.alone and not Path(self.folder, f"asked-{1 - self.me}").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3600)
        return super().score(example, trajectory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "rank", "rollouts", "more"),
    [
        # a rank scores 4 answers in a rollout; the 7th is in the second rollout, whether or not one was scored to try the task
        pytest.param((7, 7), 1, 1, ["eval.every=0"], id="rollout"),
        # in an evaluation rank 0 scores one example four times, rank 1 scores two: 4 and 8 answers before training
        pytest.param((11, 15), 1, 1, ["eval.every=1"], id="evaluation"),
        pytest.param((3, 3), 0, 0, ["eval.every=1"], id="evaluation before training"),
        pytest.param((3, 3), 1, None, ["eval.every=0", "preflight=warn"], id="preflight"),
    ],
)
def test_a_signal_to_one_rank_ends_both_in_the_middle_of_their_work(smoke, tmp_path, at, rank, rollouts, more):
    common = [o for o in smoke(*SETTINGS, *more) if not o.startswith("output_dir")]
    environment = {"PYTHONPATH": TEST_PATH, "GLOO_SOCKET_IFNAME": "lo"}

    def run(folder, *more):
        return command("train.py", *common, *more, f"hydra.run.dir={folder}", environment=environment)

    asks = (
        f"+task.at=[{at[0]},{at[1]}] +task.rank={rank} +task.folder={tmp_path} +task.alone={rollouts is None}".split()
    )
    stopped = tmp_path / "stopped"
    first = run(stopped, *asks)
    print(first.stderr)
    both = (0, 1) if rollouts is not None else (rank,)  # a preflight has no place where the ranks wait for each other
    assert first.returncode == 75 and all((tmp_path / f"asked-{r}").exists() for r in both)
    assert "SIGTERM" in first.stderr and "Traceback" not in first.stderr
    if rollouts:
        assert (
            Run(stopped).manifest["rollouts"] == rollouts and (stopped / "checkpoints" / f"{rollouts:05}.ckpt").is_dir()
        )
    for r in (0, 1):
        (tmp_path / f"asked-{r}").touch()
    assert run(stopped, *asks).returncode == 0
    assert run(tmp_path / "straight").returncode == 0
    states = [state(tmp_path / name)["state_dict"] for name in ("straight", "stopped")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert rows(tmp_path / "straight") == rows(stopped)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_by_the_one_that_is_asked_to_end(smoke, tmp_path):
    common = [o for o in smoke(*SETTINGS, "eval.every=0") if not o.startswith("output_dir")]
    asks = (
        f"+task.at=[7,7] +task.rank=0 +task.folder={tmp_path} +task.stops=true hydra.run.dir={tmp_path / 'run'}".split()
    )
    done = command("train.py", *common, *asks, environment={"PYTHONPATH": TEST_PATH, "GLOO_SOCKET_IFNAME": "lo"})
    found = re.search(
        r"without a checkpoint: it waited 25 s for rank 1 \(pid (\d+), host \S+\), which is stopped; ", done.stderr
    )
    assert done.returncode == 75 and found, done.stderr
    psutil.wait_procs([psutil.Process(int(found[1]))] if psutil.pid_exists(int(found[1])) else [], 300)
    assert not psutil.pid_exists(int(found[1]))


@pytest.mark.slow
def test_an_evaluation_that_is_asked_to_end_is_resumed(toy, tmp_path):
    """The signal comes in the second of three batches: the first one is on the disk, and is not played again."""
    common = ["eval.py", "task._target_=test_stop_ranks.Asks", f"task.path={EXAMPLES}", "task=gsm8k", "model=path"]
    common += [f"model.path={toy}", "eval.batch=1", "eval.samples=4", "eval.sampling.temperature=1", "max_tokens=8"]
    asks = ["+task.at=[7]", f"+task.folder={tmp_path}", f"hydra.run.dir={tmp_path / 'stopped'}"]
    environment = {"PYTHONPATH": TEST_PATH}
    first = command(*common, *asks, environment=environment)
    parts = sorted(file.name for file in (tmp_path / "stopped" / "parts").glob("*.parquet"))
    again = f"to resume, repeat the command with hydra.run.dir={tmp_path / 'stopped'}"
    assert (first.returncode, parts) == (75, ["000000.parquet"])
    assert first.stderr.splitlines()[-1] == f"stopped by SIGTERM; {again}"
    assert command(*common, *asks, environment=environment).returncode == 0
    assert command(*common, f"hydra.run.dir={tmp_path / 'straight'}", environment=environment).returncode == 0
    files = [(tmp_path / name / "metrics.json").read_text() for name in ("stopped", "straight")]
    assert files[0] == files[1]
