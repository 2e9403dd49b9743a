"""Compare arms on the quiz (experiment=quiz): each is plain GRPO with other values, trained with several seeds.

    python benchmarks/arms.py algo=dr_grpo algo=dapo              two arms against plain GRPO
    python benchmarks/arms.py presets                             every preset of conf/algo
    python benchmarks/arms.py presets --seeds 0 1 2 --table       no training: a table of the runs that are there

An arm is one or more overrides, with spaces between them. Finished runs are not repeated, so a stopped call continues. Runs are
trained one after another in this process, without what only a reader of a single run needs.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))
ROOT = Path(__file__).parents[1]
PLAIN = "algo=grpo"
SPARE = {
    "callbacks": "samples",
    "preflight": "off",
    "forecast": False,
    "logger": "csv",
    "alarms": "warn",
    "eval.on_start": False,
    "eval.every": 12,  # once, at the end
}


def place(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / arm.replace(" ", "+").replace("/", "-") / str(seed)


def trained(folder: Path, arm: str, seed: int) -> None:
    """Train one run, unless it has finished."""
    import grpo
    from grpo.runs.run import Run

    out = place(folder, arm, seed)
    if out.exists():
        if Run(out).status == "finished":
            return
        shutil.rmtree(out)
    began = time.process_time()
    given = {
        key: OmegaConf.from_dotlist([f"value={value}"]).value
        for key, value in (one.split("=", 1) for one in arm.split())
    }
    try:
        run = grpo.train(experiment="quiz", output_dir=out, seed=seed, **{**SPARE, **given})
    except Exception as error:  # the other arms go on
        print(f"{arm} seed {seed} failed: {error}", flush=True)
        return
    print(f"{arm} seed {seed}: {run.accuracy.iloc[-1]:.3f}, {time.process_time() - began:.0f} CPU s", flush=True)


def table(folder: Path, arms: list[str], seeds: list[int]) -> str:
    """Return a Markdown table of the finished runs, the best arm first. Differences are from plain GRPO, in percent."""
    from grpo.extras.report.comparison import compared
    from grpo.runs.run import Run

    runs = {arm: [Run(place(folder, arm, seed)) for seed in seeds] for arm in arms}
    done = {arm: [run for run in of if run.status == "finished"] for arm, of in runs.items()}
    found = compared({arm: of for arm, of in done.items() if of})
    rows = [
        "| arm | seeds | accuracy, % | difference | p | p (Holm) | tokens | groups left out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in found.iterrows():
        value, low, high = 100 * row[["value", "low", "high"]]
        cells = [f"`{arm}`", f"{len(done[arm])}", f"{value:.1f} ({low:.1f} to {high:.1f})", "", "", ""]
        if arm != PLAIN and "difference" in found:
            more, least, most = 100 * row[["difference", "difference_low", "difference_high"]]
            cells[3:] = [f"{more:+.1f} ({least:.1f} to {most:.1f})", f"{row['p']:.2g}", f"{row['p (Holm)']:.2g}"]
        metrics = [run.metrics for run in done[arm]]
        tokens = sum(one["eval/length"].dropna().iloc[-1] for one in metrics) / len(metrics)
        groups = sum(one["rollout/discarded_groups"].sum() for one in metrics) / len(metrics)
        rows.append(f"| {' | '.join([*cells, f'{tokens:.0f}', f'{groups:.0f}'])} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "arms", nargs="+", help='overrides, as algo=dapo or "algo=dapo algo/kl=loss"; presets: all of conf/algo'
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "arms")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    presets = [f"algo={file.stem}" for file in sorted((ROOT / "conf" / "algo").glob("*.yaml"))]
    named = [arm for given in arguments.arms for arm in (presets if given == "presets" else [given])]
    arms = list(dict.fromkeys([PLAIN, *named]))
    if not arguments.table:
        for seed in arguments.seeds:
            for arm in arms:
                trained(arguments.folder, arm, seed)
    print(table(arguments.folder, arms, arguments.seeds))


if __name__ == "__main__":
    main()
