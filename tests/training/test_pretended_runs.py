"""A whole run on a pretended device: no copy is missing from the first weights to the last checkpoint."""

import pytest
from helpers.pretended_run import device_of_runs
from helpers.runs import learned, rows


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
def test_the_preflight(device, smoke, capsys, monkeypatch):
    """Its checks read what they compare, and pass as they do on a CPU. They have time for all, whatever the machine's speed."""
    from grpo.extras.preflight import allowance, sampling

    monkeypatch.setattr(allowance, "LEAST", 600.0)
    monkeypatch.setattr(sampling, "PATIENCE", 600.0)
    learned(smoke("trainer=cpu", "optim.optimizer.fused=false", "preflight=warn", "rollout.num_rollouts=1"))
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if ", " in line and " s: " in line]
    assert verdicts.count("PASS") >= 12 and verdicts.count("FAIL") == 1  # a random policy never ends an answer
    assert device.count() < 1000, device.table()
