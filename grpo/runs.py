"""Layer 3 - what runs left on disk, as tables; and the picture of a learning curve.

    python -m grpo.runs outputs/wordmath/grpo/RUN ... --out curve.png

Needs the extra `plot` (pandas, matplotlib).
"""

import argparse
from pathlib import Path

import pandas as pd

from grpo.errors import UserError


def metrics(run: str | Path) -> pd.DataFrame:
    """metrics.csv: one row for each rollout, indexed by rollouts learned from; columns as they were logged."""
    file = Path(run) / "metrics.csv"
    if not file.is_file():
        raise UserError(f"{run} has no metrics.csv: give the folder of a run that had logger=csv (the default has it)")
    return pd.read_csv(file).rename(columns={"step": "rollouts"}).set_index("rollouts")


def samples(run: str | Path) -> pd.DataFrame:
    """rollouts/*.jsonl: one row for each sample of every rollout, with its messages, completion, reward, advantage."""
    files = sorted((Path(run) / "rollouts").glob("*.jsonl"))
    return pd.concat([pd.read_json(file, lines=True) for file in files], ignore_index=True)


def plot_curves(runs: list[str], out: str) -> None:
    """Held-out accuracy and length of completions against rollouts, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for run in runs:
        table = metrics(run)
        accuracy = table["eval/accuracy"].dropna()
        left.plot(accuracy.index, 100 * accuracy, marker="o", markersize=3)
        length = table["rollout/length"].dropna()
        right.plot(length.index, length)
    left.set(xlabel="rollouts", ylabel="held-out accuracy, % (greedy)", ylim=(0, 100))
    right.set(xlabel="rollouts", ylabel="tokens per completion", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plot the learning curves of runs.")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--out", default="curve.png", help="the picture to write")
    arguments = parser.parse_args()
    plot_curves(arguments.runs, arguments.out)
    print(f"written to {arguments.out}")
