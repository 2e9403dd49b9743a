"""Predicts the accuracy of runs with more compute, by a sigmoid (ScaleRL, arXiv 2510.13786).

python -m grpo.predict RUN_OR_SWEEP ... --times 4 --compute tokens
python -m grpo.predict RUN_OR_SWEEP ... --halves    # does the first half of the compute predict the second?
"""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from grpo.apps.pipes import quiet_pipe
from grpo.extras.curves.reading import Compute
from grpo.extras.report.predictions import TIMES, check, predictions, printable
from grpo.extras.report.runs import arms, load
from grpo.system.errors import UserError
from grpo.system.output.console import console


def main(arguments: Sequence[str]) -> None:
    """Run the program with these arguments."""
    words = "Predict the accuracy of runs with more compute."
    parser = argparse.ArgumentParser(prog="python -m grpo.predict", description=words)
    parser.add_argument(
        "runs", nargs="+", help="folders of runs or sweeps; runs that differ in the seed alone are an arm"
    )
    parser.add_argument("--times", type=float, default=TIMES, help="as much compute as they have had (default: 4)")
    kinds = get_args(Compute)
    parser.add_argument("--compute", choices=kinds, default=kinds[0], help="what counts as compute (default: tokens)")
    parser.add_argument("--halves", action="store_true", help="fit the first half, and print the error in the second")
    given = parser.parse_args(arguments)
    if not given.times > 0:
        raise UserError(f"--times {given.times:g} must be above 0")
    found = arms(run for run in load(*given.runs) if run.learned)
    if not found:
        raise UserError(
            f"none of {', '.join(given.runs)} has learned from a rollout: name runs that have a metrics.csv"
        )
    out = console()
    for part in (
        check(found, given.compute) if given.halves else printable(predictions(found, given.compute, given.times))
    ):
        out.print(part, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    try:
        with quiet_pipe():
            main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
