"""Two processes learn what one learns: train.py on two devices (of a CPU) compared with one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TEST_PATH
from test_train import rows, told

from grpo.runs.runs import Run
from grpo.system import distributed

EVERYTHING = [
    "algo=reinforce_pp_baseline",  # whitened over all ranks
    "algo/kl=reward",
    "algo.top_entropy=0.5",  # a threshold over all ranks
    "algo.sampling_rounds=2",
    "algo.entropy={coef: 0.01, target: 9.0}",
    "algo.num_minibatches=3",  # of 12 rows; some minibatches leave a rank without rows
    "rollout.prompts=3",
    "rollout.group_size=4",
    "rollout.num_rollouts=2",
]
CASES = {
    **{
        reduce: [f"algo.reduce={reduce}", "rollout.prompts=3", "rollout.num_rollouts=1"]
        for reduce in ("sequence", "token")
    },
    "constant": ["algo=dr_grpo", "rollout.prompts=3", "rollout.num_rollouts=1", "optim.max_tokens_per_microbatch=1"],
    "sum": ["algo=rloo", "algo/kl=loss", "rollout.num_rollouts=1", "preflight=warn"],
    "everything": EVERYTHING,
}


def learned(smoke, folder: Path, devices: int, overrides: list[str]) -> dict[str, torch.Tensor]:
    overrides = [
        *(override for override in smoke() if not override.startswith(("output_dir", "optim", "callbacks"))),
        "task._target_=test_train.Varied",
        "trainer=cpu",
        f"trainer.devices={devices}",
        "callbacks=[checkpoint]",
        "optim.optimizer._target_=torch.optim.SGD",  # at learning rate 1 the change is the gradient
        "~optim.optimizer.betas",
        "optim.optimizer.lr=1",
        "optim.max_grad_norm=null",
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    command = [sys.executable, "train.py", *overrides]
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns(smoke, tmp_path, name):
    one, two = (learned(smoke, tmp_path / str(devices), devices, CASES[name]) for devices in (1, 2))
    for parameter, expected in one.items():
        torch.testing.assert_close(two[parameter], expected, atol=1e-6, rtol=1e-5, msg=parameter)
    checked = Run(tmp_path / "2").manifest["preflight"]
    assert {check["result"] for check in checked.values() if "devices" in check["compared"]} <= {"PASS"}
    assert ("the devices' gradients add up" in checked) == (name == "sum")
    tables = [rows(tmp_path / str(devices)) for devices in (1, 2)]
    assert tables[0][1]["loss/grad_norm"] > 0.01
    for alone, shared in zip(*tables, strict=True):
        assert alone.keys() == shared.keys()
        for metric, value in alone.items():
            assert shared[metric] == pytest.approx(value, abs=1e-4), metric


def test_shares_follow_each_other(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for length in range(8):
        shares = []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            shares.append(list(distributed.share(length)))
        assert [i for share in shares for i in share] == list(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("devices", [0, "two"])
def test_devices_are_a_number(smoke, devices):
    assert f"trainer.devices={devices} must be an integer of at least 1" in told(*smoke(f"trainer.devices={devices}"))
