"""Draws metrics of runs. Needs the extra `plot` (matplotlib).

python -m grpo.plots RUN_OR_SWEEP ... --metrics eval/accuracy rollout/length --out curve.png
"""

import argparse
import sys
from collections.abc import Sequence

from grpo.apps.pipes import quiet_pipe
from grpo.extras.report.runs import load
from grpo.system.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Run the program with these arguments."""
    parser = argparse.ArgumentParser(description="Plot metrics of runs: the mean over seeds and its 95 % interval.")
    parser.add_argument("runs", nargs="+", help="folders of runs or sweeps")
    shown = ["eval/accuracy", "rollout/length"]
    parser.add_argument("--metrics", nargs="+", default=shown, help="columns of metrics.csv")
    parser.add_argument("--out", default="curve.png", help="file of the picture")
    options = parser.parse_args(arguments)
    try:
        from grpo.extras.report.run_plots import metrics
    except ModuleNotFoundError as error:
        raise UserError(f"a plot needs matplotlib ({error}): pip install -e '.[plot]'") from error
    metrics(load(*options.runs), options.metrics).savefig(options.out, dpi=150)
    print(f"written to {options.out}")


if __name__ == "__main__":
    try:
        with quiet_pipe():
            main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
