"""Compare ways to learn from a teacher with GRPO from the same start: accuracy against sampled tokens and CPU seconds.

    python benchmarks/teacher_recipes.py distil                   # every arm of a recipe, three seeds
    python benchmarks/teacher_recipes.py stuck --seeds 0          # some seeds
    python benchmarks/teacher_recipes.py distil --table           # no training: the table of the runs that are there

An arm is a list of overrides. {RECIPE/ARM} in it stands for another run with the same seed, which comes first:
a teacher or a start. Finished runs are not repeated. Runs are trained one after another in this process, without what only a reader of a single
run needs. CPU seconds are those of the process from the first rollout on, without evaluations; sampled tokens are those of the
rollouts. An arm reaches a level at the first of two evaluations in a row that are not below it.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SPARE = "preflight=off forecast=false logger=csv alarms=warn callbacks=[samples,checkpoint]"
STUCK = "model.path.hasty=1 model.path.hasty_steps=100"  # answers before any working, and is never in doubt
BEST = "teacher.model.path={distil/grpo}/checkpoints/best"
TAUGHT = f"experiment=distil {BEST}"
OPD = "algo=opd algo.teacher.divergence=sampled"
SFT = f"algo=sft task.demonstration=solution {STUCK} optim.optimizer.lr=5e-4 rollout.num_rollouts=8"
SMOLLM2 = "experiment=smollm2_sums eval.every=2"
RECIPES = {  # the first arm is what the others are compared with
    "distil": {
        "grpo": "experiment=distil_teacher",
        "grpo linear": "experiment=distil_teacher optim.optimizer.lr=3e-4 optim.schedule.name=linear rollout.num_rollouts=36",
        "gkd reverse": TAUGHT,
        "gkd forward": f"{TAUGHT} algo.teacher.divergence=forward",
        "gkd jsd": f"{TAUGHT} algo.teacher.divergence=jsd",
        "opd": f"{TAUGHT} {OPD}",
    },
    "stuck": {
        "grpo": f"experiment=distil_teacher {STUCK} rollout.num_rollouts=24",
        "gkd reverse": f"{TAUGHT} {STUCK}",
        "gkd forward": f"{TAUGHT} {STUCK} algo.teacher.divergence=forward",
        "opd": f"{TAUGHT} {STUCK} {OPD}",
        "sft": f"{SFT} eval.every=2",
        "sft then grpo": "experiment=distil_teacher model=path model.path={stuck/sft}/checkpoints/last "
        "optim.optimizer.lr=1.5e-4 rollout.num_rollouts=24",
    },
    "sibling": {
        "grpo": "experiment=quiz eval.every=2",
        "sdpo": "experiment=quiz eval.every=2 algo=sdpo",
    },
    "smollm2": {
        "grpo": SMOLLM2,
        "gkd reverse": f"{SMOLLM2} algo=gkd algo.teacher.divergence=reverse teacher.model.path={{smollm2/grpo}}/checkpoints/best "
        "rollout.group_size=2 rollout.prompts=16 optim.optimizer.lr=1e-5",
    },
}
BELOW = {"distil": 0.03, "smollm2": 0.03}  # the level: the best accuracy of the first arm with this seed, less this
LEVEL = 0.8  # of the other recipes


def place(folder: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / arm.replace(" ", "-") / str(seed)


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


def trained(folder: Path, arm: str, values: str, seed: int) -> None:
    """Train one run, unless it has finished."""
    from omegaconf import OmegaConf

    import grpo
    from grpo.runs.runs import Run

    out = place(folder, arm, seed)
    if out.exists():
        if Run(out).status == "finished":
            return
        shutil.rmtree(out)
    for recipe, arm_ in ((recipe, other) for recipe, others in RECIPES.items() for other in others):
        values = values.replace(f"{{{recipe}/{arm_}}}", str(place(folder.parent / recipe, arm_, seed)))
    pairs = [one.split("=", 1) for one in f"{SPARE} {values}".split()]
    given = {key: OmegaConf.from_dotlist([f"value={value}"]).value for key, value in pairs}
    with clock() as seconds:
        run = grpo.train(output_dir=out, seed=seed, **given)
    (out / "cpu_seconds.json").write_text(json.dumps(seconds))
    print(f"{arm} seed {seed}: {run.accuracy.iloc[-1]:.3f}, {max(seconds.values()):.0f} CPU s", flush=True)


def curve(run: Path) -> pd.DataFrame:
    """Return a row for each evaluation of a run, by rollouts: accuracy, tokens, seconds."""
    from grpo.runs.runs import Run

    metrics = Run(run).metrics
    seconds = {int(n): s for n, s in json.loads((run / "cpu_seconds.json").read_text()).items()}
    columns = {"accuracy": metrics["eval/accuracy"], "tokens": metrics["data/tokens"], "seconds": pd.Series(seconds)}
    return pd.DataFrame(columns).fillna({"tokens": 0.0}).dropna()


def reached(points: pd.DataFrame, level: float) -> pd.Series | None:
    """Return the first of two evaluations in a row that are not below the level; None if there is none."""
    enough = points["accuracy"] >= level - 1e-9
    both = points[enough & enough.shift(-1, fill_value=False)]
    return None if both.empty else both.iloc[0].rename(both.index[0])


def ratio(few: Sequence[float], many: Sequence[float]) -> str:
    """Return many / few: the geometric mean over seeds and its 95 % interval."""
    from grpo.evaluation.statistics import over_seeds

    found = over_seeds(np.log(np.array(many) / np.array(few)))
    return f"{np.exp(found.value):.1f} ({np.exp(found.low):.1f} to {np.exp(found.high):.1f})"


def table(curves: Mapping[str, Mapping[int, pd.DataFrame]], found: pd.DataFrame, below: float | None) -> str:
    """Return a Markdown table. curves: of each arm by seed; found: of `grpo.runs.comparison.compared`; below: see BELOW."""
    first = next(iter(curves))
    best = {seed: points["accuracy"].max() for seed, points in curves[first].items()}
    levels = {seed: LEVEL if below is None else value - below for seed, value in best.items()}
    rows = [
        "| arm | seeds | accuracy at the end, % | sampled tokens | CPU s | tokens to the level, by seed | rollouts |"
    ]
    rows[0] += f" CPU s | times fewer tokens than {first} |"
    rows.append("|" + "---|" * (rows[0].count("|") - 1))
    for arm, by_seed in curves.items():
        value, low, high = 100 * found.loc[arm, ["value", "low", "high"]]
        ends = pd.DataFrame([points.iloc[-1] for points in by_seed.values()]).mean()
        cells = [f"`{arm}`", f"{len(by_seed)}", f"{value:.1f} ({low:.1f} to {high:.1f})"]
        cells += [f"{ends['tokens']:,.0f}", f"{ends['seconds']:.0f}"]
        points = {seed: reached(by_seed[seed], level) for seed, level in levels.items() if seed in by_seed}
        cells.append(", ".join("never" if point is None else f"{point['tokens']:,.0f}" for point in points.values()))
        theirs = {seed: reached(curves[first][seed], level) for seed, level in levels.items()}
        if points and not any(point is None for point in points.values()):
            cells.append(f"{np.mean([point.name for point in points.values()]):.0f}")
            cells.append(f"{np.mean([point['seconds'] for point in points.values()]):.1f}")
            both = [(points[seed]["tokens"], theirs[seed]["tokens"]) for seed in points if theirs[seed] is not None]
            cells.append(ratio(*zip(*both, strict=True)) if arm != first and both else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--arms", nargs="+", help="some arms of the recipe")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "teachers")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    folder, recipe = arguments.folder.resolve() / arguments.recipe, RECIPES[arguments.recipe]
    arms = [arm for arm in recipe if arm in (arguments.arms or recipe)]
    for seed in () if arguments.table else arguments.seeds:
        for arm in arms:
            trained(folder, arm, recipe[arm], seed)
    from grpo.runs.comparison import compared
    from grpo.runs.runs import Run

    done = {
        arm: [seed for seed in arguments.seeds if (place(folder, arm, seed) / "cpu_seconds.json").exists()]
        for arm in arms
    }
    done = {arm: seeds for arm, seeds in done.items() if seeds}
    found = compared({arm: [Run(place(folder, arm, seed)) for seed in seeds] for arm, seeds in done.items()})
    print(
        table(
            {arm: {seed: curve(place(folder, arm, seed)) for seed in seeds} for arm, seeds in done.items()},
            found,
            BELOW.get(arguments.recipe),
        )
    )


if __name__ == "__main__":
    main()
