"""`python -m grpo.report RUN_OR_SWEEP`: writes its report.html and says where."""

import argparse
import sys

from grpo.runs.report import SAMPLES, write_report
from grpo.system.errors import UserError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m grpo.report", description="One page of what a run or a sweep left, for a browser."
    )
    parser.add_argument("folder", help="of a run or of a sweep")
    parser.add_argument("--out", help="the page to write; else FOLDER/report.html")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of a run in the page at most")
    given = parser.parse_args()
    try:
        print(f"written to {write_report(given.folder, given.out, given.samples)}")
    except UserError as error:
        sys.exit(f"error: {error}")
