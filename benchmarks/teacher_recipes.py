"""Learn from a teacher, and from rewards alone, from the same start: accuracy against sampled tokens and CPU seconds.

    python benchmarks/teacher_recipes.py distil                   # every arm of a recipe, three seeds
    python benchmarks/teacher_recipes.py stuck --seeds 0          # after distil, whose first arm is the teacher
    python benchmarks/teacher_recipes.py distil --table           # no training: the table of the runs that are there

An arm is a list of overrides. {RECIPE/ARM} in it stands for another run with the same seed, a teacher or a start, which is there.
Finished runs are not repeated. Runs are trained one after another in this process, without what only a reader of one run needs.
CPU seconds are those of the process from the first rollout on, without evaluations; sampled tokens are those of the rollouts.
An arm reaches a level at the first of two evaluations in a row that are not below it.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SPARE = "preflight=off forecast=false logger=csv alarms=warn callbacks=[samples,checkpoint]"
REWARDS = "experiment=distil_teacher"
STUCK = "model.path.hasty=1 model.path.hasty_steps=100"  # answers before any working, and is never in doubt
TAUGHT = "experiment=distil teacher.model.path={distil/grpo}/checkpoints/best"
FORWARD, JSD = (f"algo.teacher.divergence={name}" for name in ("forward", "jsd"))
OPD = "algo=opd algo.teacher.divergence=sampled"
SFT = f"algo=sft {STUCK} optim.optimizer.lr=5e-4"
QUIZ, SUMS = "experiment=quiz eval.every=2", "experiment=smollm2_sums eval.every=2"
RECIPES = {  # the first arm is what the others are compared with
    "distil": {
        "grpo": REWARDS,
        "grpo linear": f"{REWARDS} optim.optimizer.lr=3e-4 optim.schedule.name=linear rollout.num_rollouts=36",
        "gkd reverse": TAUGHT,
        "gkd forward": f"{TAUGHT} {FORWARD}",
        "gkd jsd": f"{TAUGHT} {JSD}",
        "opd": f"{TAUGHT} {OPD}",
    },
    "stuck": {
        "grpo": f"{REWARDS} {STUCK} rollout.num_rollouts=24",
        "gkd reverse": f"{TAUGHT} {STUCK}",
        "gkd forward": f"{TAUGHT} {STUCK} {FORWARD}",
        "opd": f"{TAUGHT} {STUCK} {OPD}",
        "sft": f"{SFT} rollout.num_rollouts=8 eval.every=2",
        "sft long": f"{SFT} rollout.num_rollouts=48 eval.every=4 optim.schedule.name=linear",
        "sft then grpo": f"{REWARDS} model=path model.path={{stuck/sft}}/checkpoints/last optim.optimizer.lr=1.5e-4 "
        "rollout.num_rollouts=24",
    },
    "sibling": {"grpo": QUIZ, "sdpo": f"{QUIZ} algo=sdpo"},
    "smollm2": {
        "grpo": SUMS,
        "gkd reverse": f"{SUMS} algo=gkd algo.teacher.divergence=reverse teacher.model.path={{smollm2/grpo}}/checkpoints/best "
        "rollout.group_size=2 rollout.prompts=16 optim.optimizer.lr=1e-5",
    },
}
BELOW = {"distil": 0.03, "smollm2": 0.03}  # the level: the best accuracy of the first arm with this seed, less this
LEVEL = 0.8  # of the other recipes


@contextmanager
def clock() -> Iterator[dict[int, float]]:
    """Yield the CPU seconds of the learning until each evaluation, by the rollouts before it."""
    from grpo.training.callbacks.evaluation import EvaluationCallback

    evaluate, seconds, apart = EvaluationCallback.evaluate, {}, [0.0]

    def timed(callback):
        began = time.process_time()
        apart[0] = apart[0] if seconds else began
        seconds[callback.rollout.learned] = began - apart[0]
        result = evaluate(callback)
        apart[0] += time.process_time() - began
        return result

    EvaluationCallback.evaluate = timed
    try:
        yield seconds
    finally:
        EvaluationCallback.evaluate = evaluate


def trained(places: Mapping[str, Path], run: str, seed: int) -> None:
    """Train one run, unless it has finished. places: the folder of each RECIPE/ARM."""
    from grpo.apps.cli import quiet
    from grpo.config.composing import composed
    from train import train

    out, (recipe, arm) = places[run], run.split("/")
    if (out / "cpu_seconds.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    values = f"{SPARE} {RECIPES[recipe][arm]}"
    for other, place in places.items():
        values = values.replace(f"{{{other}}}", str(place))
    words = [*values.split(), f"seed={seed}", f"output_dir={out}"]
    quiet()
    with clock() as seconds:
        accuracy, _ = train(composed("train", words), words)
    (out / "cpu_seconds.json").write_text(json.dumps(seconds))
    print(f"{run} seed {seed}: {accuracy:.3f}, {max(seconds.values()):.0f} CPU s", flush=True)


def curve(metrics: pd.DataFrame, seconds: Mapping[str, float]) -> pd.DataFrame:
    """Return a row for each evaluation of a run, by rollouts: accuracy, tokens, seconds."""
    by_rollout = pd.Series({int(n): s for n, s in seconds.items()})
    columns = {"accuracy": metrics["eval/accuracy"], "tokens": metrics["data/tokens"], "seconds": by_rollout}
    return pd.DataFrame(columns).fillna({"tokens": 0.0}).dropna().rename_axis("rollouts").reset_index()


def reached(points: pd.DataFrame, level: float) -> pd.Series:
    """Return the first of two evaluations in a row that are not below the level; NaN if there is none."""
    enough = points["accuracy"] >= level - 1e-9
    both = points[enough & enough.shift(-1, fill_value=False)]
    return points.iloc[0] * np.nan if both.empty else both.iloc[0]


def table(curves: Mapping[str, Mapping[int, pd.DataFrame]], found: pd.DataFrame, below: float | None) -> str:
    """Return a Markdown table. curves: of each arm by seed; found: of `comparison.compared`; below: see BELOW."""
    from grpo.extras.report.statistics import over_seeds

    first, *_ = curves
    level = {
        seed: LEVEL if below is None else points["accuracy"].max() - below for seed, points in curves[first].items()
    }
    head = "| arm | seeds | accuracy at the end, % | tokens | CPU s | level: rollouts | tokens by seed | CPU s | times fewer |"
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    for arm, by_seed in curves.items():
        value, low, high = 100 * found.loc[arm, ["value", "low", "high"]]
        ends = pd.DataFrame([points.iloc[-1] for points in by_seed.values()]).mean()
        there = pd.DataFrame({seed: reached(by_seed[seed], level[seed]) for seed in level if seed in by_seed}).T
        theirs = pd.DataFrame({seed: reached(curves[first][seed], level[seed]) for seed in there.index}).T
        fewer = over_seeds(np.log(theirs["tokens"] / there["tokens"]).dropna())  # the geometric mean
        cells = [arm, f"{len(by_seed)}", f"{value:.1f} ({low:.1f} to {high:.1f})", f"{ends['tokens']:,.0f}"]
        cells += [f"{ends['seconds']:.0f}", f"{there['rollouts'].mean():.0f}"]
        cells += [", ".join("never" if np.isnan(n) else f"{n:,.0f}" for n in there["tokens"])]
        cells += [f"{there['seconds'].mean():.1f}", "{:.1f} ({:.1f} to {:.1f})".format(*np.exp(fewer[:3]))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def against_rollouts(curves: Mapping[str, Mapping[int, pd.DataFrame]]) -> str:
    """Return a Markdown table: the mean accuracy of each arm at each evaluation."""
    means = {arm: pd.concat(of.values()).groupby("rollouts")["accuracy"].mean() for arm, of in curves.items()}
    points = {arm: ", ".join(f"{n:.0f}: {100 * value:.1f}" for n, value in of.items()) for arm, of in means.items()}
    return "\n".join(
        ["| arm | accuracy, %, after rollouts |", "|---|---|", *(f"| {a} | {p} |" for a, p in points.items())]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--arms", nargs="+", help="some arms of the recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "teachers")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    arms = [arm for arm in RECIPES[given.recipe] if arm in (given.arms or RECIPES[given.recipe])]
    from grpo.extras.report.comparison import compared
    from grpo.runs.run import Run

    runs: dict[str, dict[int, Run]] = {arm: {} for arm in arms}
    for seed in given.seeds:
        places = {
            f"{r}/{arm}": given.folder.resolve() / r / arm.replace(" ", "-") / str(seed)
            for r in RECIPES
            for arm in RECIPES[r]
        }
        for arm in arms:
            if not given.table:
                trained(places, f"{given.recipe}/{arm}", seed)
            if (place := places[f"{given.recipe}/{arm}"]).joinpath("cpu_seconds.json").exists():
                runs[arm][seed] = Run(place)
    runs = {arm: by_seed for arm, by_seed in runs.items() if by_seed}
    found = compared({arm: list(by_seed.values()) for arm, by_seed in runs.items()})
    seconds = lambda run: json.loads((run.folder / "cpu_seconds.json").read_text())  # noqa: E731
    curves = {arm: {seed: curve(run.metrics, seconds(run)) for seed, run in of.items()} for arm, of in runs.items()}
    print(table(curves, found, BELOW.get(given.recipe)), against_rollouts(curves), sep="\n\n")


if __name__ == "__main__":
    main()
