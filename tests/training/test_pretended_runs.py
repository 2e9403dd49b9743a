"""A whole run on a pretended device: no copy is missing from the first weights to the last checkpoint."""

import pytest
from helpers.pretended_run import device_of_runs
from helpers.runs import learned, rows

from grpo.runs.run import Run


@pytest.fixture
def device():
    with device_of_runs() as device:
        yield device


@pytest.mark.slow
@pytest.mark.parametrize(("more", "waits"), [("", 180), ("algo=ppo critic=head", 230)])
def test_a_run_from_end_to_end(device, smoke, tmp_path, more, waits):
    """Most waits are those of Lightning at both ends of a run, and of the trial of caches and layouts."""
    learned(smoke("trainer=cpu", "optim.optimizer.fused=false", "callbacks=[samples]", *more.split()))
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
    assert device.count() <= waits, device.table()


@pytest.mark.slow
def test_the_preflight(device, smoke, tmp_path, monkeypatch):
    """Its checks read what they compare, and pass as they do on a CPU. They have time for all, whatever the machine's speed, 400
    draws among them, 20 at once."""
    from grpo.extras.preflight import allowance, sampling

    monkeypatch.setattr(allowance, "LEAST", 600.0)
    monkeypatch.setattr(sampling, "PATIENCE", 600.0)
    monkeypatch.setattr(sampling, "MOST_DRAWS", 400)
    learned(smoke("trainer=cpu", "optim.optimizer.fused=false", "preflight=warn", "rollout.num_rollouts=1"))
    verdicts = [check["result"] for check in Run(tmp_path).manifest["preflight"].values()]
    assert verdicts.count("PASS") >= 12 and verdicts.count("FAIL") == 1  # a random policy never ends an answer
    assert device.count() < 1000, device.table()
