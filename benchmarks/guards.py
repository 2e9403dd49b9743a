"""Measure what preflight and alarms cost: CPU seconds of the demo's first 20 rollouts with and without, and each check.

    python benchmarks/guards.py [--cycles 3] [OVERRIDE ...]     # about four minutes

The runs take turns in one process. Nothing is evaluated, saved or shown.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from grpo.apps.cli import quiet
from grpo.config.composing import composed
from grpo.runs.run import Run

sys.path.insert(0, str(Path(__file__).parents[1]))

KINDS = {
    "neither": ["preflight=off", "callbacks=none"],
    "alarms": ["preflight=off", "callbacks=[health]"],
    "preflight and alarms": ["preflight=on", "callbacks=[health]"],
}
PLAIN = ["forecast=false", "eval.every=0", "logger=none", "rollout.num_rollouts=20"]


def seconds(overrides: list[str]) -> tuple[float, dict[str, float]]:
    """Return the CPU seconds of a run, and the seconds of each check of its preflight."""
    from train import train

    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        train(composed("train", [*PLAIN, *overrides, f"output_dir={folder}"]))
        spent = time.process_time() - begun
        checks = Run(folder).manifest.get("preflight", {})
    return spent, {name: check["seconds"] for name, check in checks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=3, help="runs of each kind")
    parser.add_argument("overrides", nargs="*", help="settings of train.py")
    given = parser.parse_args()
    quiet()
    seconds(["preflight=on", *given.overrides, "rollout.num_rollouts=1"])  # the first run imports and warms up
    found: dict[str, list] = {kind: [] for kind in KINDS}
    for _ in range(given.cycles):
        for kind, more in KINDS.items():
            found[kind].append(seconds([*more, *given.overrides]))
    base = median(spent for spent, _ in found["neither"])
    for kind, runs in found.items():
        spent = median(spent for spent, _ in runs)
        print(f"{kind:22}{spent:8.1f} CPU s{spent / base - 1:+8.1%}")
    runs = [checks for _, checks in found["preflight and alarms"]]
    for name in runs[0]:
        print(f"  {name:36}{median(checks[name] for checks in runs):8.2f} s")


if __name__ == "__main__":
    main()
