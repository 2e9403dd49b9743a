"""`python -m grpo.report FOLDER` writes report.html of a run, or of all runs in a folder; --serve shows it."""

import argparse
import sys
from contextlib import suppress

from grpo.apps.pipes import quiet_pipe
from grpo.extras.report import SAMPLES, write_report
from grpo.extras.report.serve import serve
from grpo.system.errors import UserError


def main() -> None:
    """Run the program."""
    words = "Write a run, or all runs of a folder, as one HTML page for a browser, or show them there."
    parser = argparse.ArgumentParser(prog="python -m grpo.report", description=words)
    parser.add_argument("folder", help="folder of a run, of a sweep, or any with runs")
    parser.add_argument("--out", help="path of the page (default: FOLDER/report.html)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="largest number of samples in a page")
    parser.add_argument("--serve", action="store_true", help="show all runs of the folder at http://127.0.0.1:PORT")
    parser.add_argument("--port", type=int, default=8060, help="port of --serve (default: 8060)")
    given = parser.parse_args()
    if given.serve:
        server = serve(given.folder, given.port)
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    else:
        print(f"written to {write_report(given.folder, given.out, given.samples)}")


if __name__ == "__main__":
    try:
        with quiet_pipe():
            main()
    except UserError as error:
        sys.exit(f"error: {error}")
