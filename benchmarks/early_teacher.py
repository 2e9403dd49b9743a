"""Measure what it saves to ask a served teacher while the rollout is played (teacher.early), in two runs that differ in that.

    python benchmarks/early_teacher.py [SECONDS]

The teacher is a server on this machine that answers SECONDS after it was asked, 0.5 by default, and computes nothing, as one on
another machine. Both runs learn the demo with the same seed; the first rollout is not counted.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import pandas as pd
from helpers.foreign_server import Scorer

from grpo.config.composing import composed
from train import train

TIMES = "time/rollout", "time/teacher", "time/update"


class Distant(Scorer):
    """A teacher whose answers take a while. It gives each token a probability of its own."""

    seconds = 0.0

    def score(self, body):
        time.sleep(self.seconds)
        return super().score(body)


def seconds_of(server: Scorer, early: bool) -> pd.Series:
    """Return the mean seconds of each part of a rollout, and the last divergence."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"""algo=opd teacher=server teacher.urls=[{server.url}] teacher.early={early} rollout.num_rollouts=5
            rollout.prompts=32 rollout.group_size=4 eval.every=0 preflight=off forecast=false callbacks=none logger=csv
            output_dir={folder}"""
        train(composed("train", words.split()))
        rows = pd.read_csv(Path(folder, "metrics.csv"))
    rows = rows[rows["time/rollout"].notna()]
    return pd.concat([rows[[*TIMES]].iloc[1:].mean(), rows[["teacher/divergence"]].iloc[-1]])


if __name__ == "__main__":
    with Distant() as server:
        server.seconds = float(sys.argv[1]) if sys.argv[1:] else 0.5
        found = pd.DataFrame({f"early={early}": seconds_of(server, early) for early in (False, True)})
    print(found.round(3).to_string())
