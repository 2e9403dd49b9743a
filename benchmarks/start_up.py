"""Measure what programs cost until their first line, until the first rollout begins, and until their end, in one tree or in two.

    python benchmarks/start_up.py [TREE ...] [--repeats 5] [--cases train eval ...] [--json]

TREE: folders of this project, such as a clone with an older commit; this one by default. The trees take turns. Figures are
medians of the program's CPU seconds (user and system, one thread) and of wall seconds. A first run, which compiles,
is not counted. Needs Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
CASES = {  # a command; the beginnings of the lines at which to look
    "train": (
        "train.py preflight=off forecast=false rollout.num_rollouts=1 hydra.run.dir=FOLDER",
        ("training", "plan"),
    ),
    "eval": ("eval.py trainer=cpu eval.limit=8 hydra.run.dir=FOLDER", ()),
    "help": ("train.py --help", ()),
    "mistyped": ("train.py rollout.promts=8 hydra.run.dir=FOLDER", ()),
    "wrong": ("train.py rollout.prompts=-1 hydra.run.dir=FOLDER", ()),
}
TICKS = os.sysconf("SC_CLK_TCK")
Moment = tuple[float, float]  # CPU and wall seconds


def spent(pid: int) -> float:
    """Return the CPU seconds of a process and of the processes that it has waited for."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / TICKS


def measured(tree: Path, case: str) -> dict[str, Moment]:
    """Run a command in a tree, and return the moment of each line that the case looks for, and of the end."""
    command, looked_for = CASES[case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tree)}
    found: dict[str, Moment] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *command.replace("FOLDER", f"{folder}/run").split()]
        begun, streams = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        program = subprocess.Popen(words, cwd=tree, env=environment, text=True, **streams)
        for line in program.stdout:
            for start in looked_for:
                if line.startswith(f"{start}: ") and start not in found:
                    found[start] = spent(program.pid), time.monotonic() - begun
        used, program.returncode = os.wait4(program.pid, 0)[2], 0
        found["end"] = used.ru_utime + used.ru_stime, time.monotonic() - begun
    assert found.keys() == {*looked_for, "end"}, f"{tree}: {' '.join(words)} printed {sorted(found)}"
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    trees, rows = [tree.resolve() for tree in given.trees], []
    if not given.json:
        print("| command | until | CPU s | wall s |\n|---|---|---|---|")
    for case in given.cases:
        rounds = [[measured(tree, case) for tree in trees] for _ in range(given.repeats + 1)][1:]
        for until in rounds[0][0]:
            cpu, wall = ([median(run[until][i] for run in its) for its in zip(*rounds, strict=True)] for i in (0, 1))
            rows.append({"case": case, "until": until, "cpu_s": cpu, "wall_s": wall})
            if not given.json:
                cells = (" -> ".join(f"{value:.2f}" for value in values) for values in (cpu, wall))
                print(f"| {case} | {until} |", " | ".join(cells), "|", flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
