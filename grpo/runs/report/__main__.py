"""`python -m grpo.report RUN_OR_SWEEP` writes report.html and prints its path."""

import argparse
import sys

from grpo.runs.report import SAMPLES, write_report
from grpo.system.errors import UserError

if __name__ == "__main__":
    words = "Write a run or a sweep as one HTML page for a browser."
    parser = argparse.ArgumentParser(prog="python -m grpo.report", description=words)
    parser.add_argument("folder", help="folder of a run or of a sweep")
    parser.add_argument("--out", help="path of the page (default: FOLDER/report.html)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="largest number of samples in the page of a run")
    given = parser.parse_args()
    try:
        print(f"written to {write_report(given.folder, given.out, given.samples)}")
    except UserError as error:
        sys.exit(f"error: {error}")
