"""Runs in this process: what they leave, without measured times, and the line that a user gets."""

import csv

import pytest
from conftest import EXAMPLES, compose_config

TIMES = """time/rollout time/update time/sync time/eval time/played time/score time/teacher time/started tokens/s
    time/engine_idle time/weights rollout/flying_groups rollout/buffered_groups     memory/rollout memory/update""".split()


VARIED = {"_target_": "helpers.slots.Varied", "path": str(EXAMPLES)}


def learned(overrides: list[str], task=VARIED) -> None:
    """Train a command line with another task."""
    from train import train

    config = compose_config(*overrides)
    config.task = task
    train(config)


def rows(folder) -> list[dict[str, float]]:
    with open(folder / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v and k not in TIMES} for row in csv.DictReader(file)]


def state(folder) -> dict:
    from grpo.training.checkpoints import PlainCheckpoints

    return PlainCheckpoints().load_checkpoint(folder / "checkpoints" / "last.ckpt")


def told(*overrides: str, name: str = "train") -> str:
    """Return the line that a user gets."""
    import eval
    from grpo.apps.cli import announced
    from grpo.config.explain import explain
    from train import train

    try:
        config = compose_config(*overrides, name=name)
        train(announced(config, overrides)) if name == "train" else eval.evaluate(config)
    except Exception as error:
        line = explain(error, name, overrides)
        assert line is not None and "\n" not in line, f"no one-line answer to {error!r}"
        return line
    pytest.fail(f"{overrides} was accepted")
