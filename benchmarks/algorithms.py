"""Train every preset of conf/algo on the demo task, several seeds each: one table, one plot.

    python benchmarks/algorithms.py                     everything; finished runs are not repeated
    python benchmarks/algorithms.py --presets grpo gspo --seeds 0 1

Each rollout has four updates, so that the ratio leaves 1 and the presets differ in more than their advantage. Everything else
is the demo's default, tuned for no preset. Prints the table (markdown) and draws the plot; each run's folder stays in --folder.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo.runs.run import Run

ROOT = Path(__file__).parents[1]
PRESETS = sorted(file.stem for file in (ROOT / "conf" / "algo").glob("*.yaml"))


def run(preset: str, seed: int, folder: Path, rollouts: int) -> Path:
    """Train once, unless the finished run exists. Return its folder."""
    out = folder / f"{preset}-{seed}"
    if not (out / "metrics.csv").exists() or Run(out).metrics.index[-1] < rollouts:
        command = [sys.executable, "train.py", f"algo={preset}", "algo.num_minibatches=4", f"seed={seed}"]
        command += [f"rollout.num_rollouts={rollouts}", "eval.every=5", f"hydra.run.dir={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        (out / "config.yaml").unlink(missing_ok=True)  # left by an interrupted run
        (out / "metrics.csv").unlink(missing_ok=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{preset} seed {seed} failed:\n{done.stderr}")
        print(f"{out} done", flush=True)
    return out


def interval(values: np.ndarray) -> np.ndarray:
    """Return half the width of the 95 % interval of the mean over seeds (axis 0), by Student's t."""
    n = len(values)
    return t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / n**0.5 if n > 1 else np.full(values.shape[1:], np.nan)


def table(runs: dict[str, list[pd.DataFrame]]) -> str:
    """Return a Markdown table with a row for each preset, best final accuracy first."""
    rows = []
    for preset, tables in runs.items():
        accuracy = 100 * np.array([t["eval/accuracy"].dropna() for t in tables])
        final, mean, half = accuracy[:, -1], accuracy.mean(axis=1), interval(accuracy[:, -1])
        means = {
            name: np.mean([t[name].mean() for t in tables if name in t])
            for name in ("loss/approx_kl", "rollout/length", "loss/entropy")
        }
        clipped = np.mean([t.filter(like="clip_fraction").sum(axis=1).iloc[1:].mean() for t in tables])
        rows.append((
            final.mean(),
            f"| `{preset}` | {final.mean():.1f} ± {half:.1f} | {mean.mean():.1f} | {means['rollout/length']:.0f} "
            f"| {means['loss/entropy']:.3f} | {means['loss/approx_kl']:.4f} | {100 * clipped:.2f} |",
        ))  # fmt: skip
    head = "| preset | final accuracy, % | mean over the run, % | tokens | entropy | approx_kl | clipped, % |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(row for _, row in sorted(rows, reverse=True))])


def plot(runs: dict[str, list[pd.DataFrame]], out: str) -> None:
    """Plot reward and held-out accuracy against rollouts: mean and 95 % interval over seeds, a panel for each preset."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    lines = -(-len(runs) // columns)
    shape = {"figsize": (2.6 * columns, 2.1 * lines), "layout": "constrained", "sharex": True, "sharey": True}
    figure, panels = plt.subplots(lines, columns, squeeze=False, **shape)
    for axes in panels.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, (preset, tables) in zip(panels.flat, runs.items(), strict=False):
        for name, colour, label in (("rollout/reward", "C0", "reward"), ("eval/accuracy", "C1", "held-out accuracy")):
            values = np.array([t[name].dropna() for t in tables])
            at = tables[0][name].dropna().index
            mean, half = values.mean(axis=0), interval(values)
            axes.plot(at, mean, color=colour, marker="o" if len(at) < 15 else None, markersize=2.5, label=label)
            axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
        axes.set(title=preset, ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("rollouts")
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each with one thread")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "algorithms")
    parser.add_argument("--plot", default=str(ROOT / "docs" / "algorithms.png"))
    arguments = parser.parse_args()
    todo = [(preset, seed) for seed in arguments.seeds for preset in arguments.presets]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        folders = pool.map(lambda job: run(*job, arguments.folder, arguments.rollouts), todo)
        found = dict(zip(todo, (Run(folder).metrics for folder in folders), strict=True))
    runs = {preset: [found[preset, seed] for seed in arguments.seeds] for preset in arguments.presets}
    print(table(runs))
    plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
