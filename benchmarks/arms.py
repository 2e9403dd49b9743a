"""Compare arms on the quiz (experiment=quiz): each is plain GRPO with other values, trained with several seeds.

    python benchmarks/arms.py algo=dr_grpo algo=dapo              two arms against plain GRPO
    python benchmarks/arms.py presets                             every preset of conf/algo
    python benchmarks/arms.py presets --seeds 0 1 2 --table       no training: a table of the runs that are there

An arm is one or more overrides, with spaces between them. Finished runs are not repeated, so a stopped call continues. Runs are
trained one after another in this process, without what only a reader of a single run needs.
"""

import argparse
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))
ROOT = Path(__file__).parents[1]
PLAIN = "algo=grpo"
SPARE = {"callbacks": "samples", "preflight": "off", "forecast": False, "logger": "csv", "alarms": "warn"}


def place(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / arm.replace(" ", "+").replace("/", "-") / str(seed)


def trained(folder: Path, arm: str, seed: int) -> None:
    """Train one run, unless it has finished."""
    import grpo
    from grpo.runs.runs import Run

    out = place(folder, arm, seed)
    if out.exists() and Run(out).status == "finished":
        return
    began = os.times().user
    given = {
        part.partition("=")[0]: OmegaConf.from_dotlist([f"value={part.partition('=')[2]}"]).value
        for part in arm.split()
    }
    grpo.train(experiment="quiz", output_dir=out, resume="none", seed=seed, **{**SPARE, **given})
    print(
        f"{arm} seed {seed}: {grpo.load_run(out).accuracy.iloc[-1]:.3f}, {os.times().user - began:.0f} CPU s",
        flush=True,
    )


def table(folder: Path, arms: list[str], seeds: list[int]) -> str:
    """Return a Markdown table, the best arm first. Differences are from plain GRPO, in points of held-out accuracy."""
    from grpo.runs.comparison import compared
    from grpo.runs.runs import Run

    runs = {arm: [Run(place(folder, arm, seed)) for seed in seeds] for arm in arms}
    done = {arm: [run for run in of if run.status == "finished"] for arm, of in runs.items()}
    done = {arm: of for arm, of in done.items() if of}
    found = 100 * compared(done)[["value", "low", "high", "difference", "difference_low", "difference_high"]]
    rows = ["| arm | seeds | accuracy, % | difference | p | p (Holm) | tokens |", "|---|---|---|---|---|---|---|"]
    ps = compared(done)[["p", "p (Holm)"]]
    for arm, (value, low, high, more, least, most) in found.iterrows():
        tokens = sum(run.metrics["eval/length"].dropna().iloc[-1] for run in done[arm]) / len(done[arm])
        row = [f"`{arm}`", f"{len(done[arm])}", f"{value:.1f} ({low:.1f} to {high:.1f})"]
        p, adjusted = ps.loc[arm]
        row += (
            ["", "", ""]
            if arm == PLAIN
            else [f"{more:+.1f} ({least:.1f} to {most:.1f})", f"{p:.2g}", f"{adjusted:.2g}"]
        )
        rows.append(f"| {' | '.join([*row, f'{tokens:.0f}'])} |")
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
