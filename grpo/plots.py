"""Draws metrics of runs. Needs the extra `plot` (matplotlib).

python -m grpo.plots RUN_OR_SWEEP ... --metrics eval/accuracy rollout/length --out curve.png
"""

import argparse
import sys

from grpo.runs.plots import metrics
from grpo.runs.runs import load
from grpo.system.errors import UserError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plot metrics of runs: the mean over seeds and its 95 % interval.")
    parser.add_argument("runs", nargs="+", help="folders of runs or sweeps")
    shown = ["eval/accuracy", "rollout/length"]
    parser.add_argument("--metrics", nargs="+", default=shown, help="columns of metrics.csv")
    parser.add_argument("--out", default="curve.png", help="file of the picture")
    given = parser.parse_args()
    try:
        metrics(load(*given.runs), given.metrics).savefig(given.out, dpi=150)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"written to {given.out}")
