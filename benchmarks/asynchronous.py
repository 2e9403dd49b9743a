"""Compare rollouts ahead of the update with rollouts in turn: seconds, idle shares, staleness, accuracy and sampled tokens.

    python benchmarks/asynchronous.py demo                     # every arm, three seeds; finished runs are not repeated
    python benchmarks/asynchronous.py quiz --arms ahead=0 "ready 4 tis" --seeds 0
    python benchmarks/asynchronous.py demo --table             # no training: the table of the runs that are there

The engine and the update take set times (benchmarks/paced.py), so that generation takes as long as the update in `demo` and
`quiz`. In `tail` some completions take several times as long, and generation several times as long as the update. An arm is an
order of handing over, a number of rollouts ahead, and what accounts for old samples: `tis`, truncated importance weights beside
the trainer's ratio; `ratio`, no correction, and a ratio to the policy that sampled. `ahead=0` is plain GRPO.

Seconds a rollout are the median of update and wait. `whole` is the mean over the run, with the waits round evaluations, which
themselves take no time. `allowed` is the speed-up by arithmetic, (Tg + Tu) / max(Tg, Tu), from the times of ahead=0 with the same
seed. With order=ready rollouts share the engine's slots, so that Tg in the denominator is the time of all steps in full slots.
Shares are of the time between two handovers, without those round an evaluation. A level is reached at the first of two
evaluations in a row that are not below it. Intervals are 95 %, Student's t over seeds; that of accuracy covers other problems.
"""

import argparse
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

SPARE = "preflight=off forecast=false logger=csv alarms=warn callbacks=[samples]"
PACED = "engine._target_=paced.Paced module._target_=paced.PacedModule"
DEMO = "rollout.prompts=8 rollout.num_rollouts=24 eval.every=4"
QUIZ = "experiment=quiz eval.every=2"
# of each case: its overrides, seconds of a step and of an update, slots, and the level
CASES: dict[str, tuple[str, float, float, int, float]] = {
    "demo": (DEMO, 0.025, 1.05, 64, 0.7),
    "quiz": (QUIZ, 0.015, 1.4, 48, 0.4),
    "tail": (f"{DEMO} +engine.tail=0.05 +engine.stretch=4", 0.025, 1.05, 64, 0.7),
}
TAIL = {"tail": (0.05, 4)}
CORRECTIONS = {"tis": "algo/correction=tis", "ratio": "algo.old_policy=rollout"}
ARMS = {"ahead=0": ""} | {
    f"{order} {ahead} {name}": f"rollout.ahead={ahead} rollout.order={order} {words}"
    for (name, words), order, ahead in product(CORRECTIONS.items(), ("exact", "ready"), (1, 2, 4))
}


@contextmanager
def evaluations_aside() -> Iterator[None]:
    """Let evaluations take none of the paced engine's time."""
    from grpo.training.callbacks.evaluation import EvaluationCallback

    evaluate = EvaluationCallback.evaluate

    def aside(callback, **stop):
        engine, here = callback.rollout.engine, threading.get_ident()
        engine.aside.add(here)
        try:
            return evaluate(callback, **stop)
        finally:
            engine.aside.discard(here)

    EvaluationCallback.evaluate = aside
    try:
        yield
    finally:
        EvaluationCallback.evaluate = evaluate


def trained(case: str, arm: str, seed: int, out: Path) -> None:
    """Train one run, unless it has finished."""
    from grpo.apps.cli import quiet
    from grpo.config.composing import composed
    from train import train

    if (out / "finished").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    words, step, update, slots, _ = CASES[case]
    pace = f"{PACED} +engine.step={step} +engine.slots={slots} +module.update={update}"
    given = [*f"{SPARE} {words} {pace} {ARMS[arm]}".split(), f"seed={seed}", f"output_dir={out}"]
    quiet()
    with evaluations_aside():
        accuracy, _ = train(composed("train", given), given)
    (out / "finished").touch()
    print(f"{case}, {arm}, seed {seed}: {accuracy:.3f}", flush=True)


def times(metrics: pd.DataFrame, ahead: int) -> dict[str, float]:
    """Return what a run says of its speed, without its last `ahead` rollouts, which leave nothing to play. metrics: a row for
    each number of rollouts learned from."""
    rows = metrics[metrics["time/update"].notna()]
    cycle = rows[["time/rollout", "time/update", "time/sync"]].sum(axis=1)
    steady = [b for a, b in pairwise(rows.index[: len(rows) - ahead]) if pd.isna(metrics["eval/accuracy"].get(a))]
    waited, idle = rows["time/rollout"], cycle - rows["time/rollout"]
    if "time/engine_idle" in rows:
        idle = rows["time/engine_idle"]
    evaluated = rows["time/eval"].iloc[:-1].sum()
    started = rows["time/started"]
    return {
        "seconds": cycle[steady].median(),
        "whole": (started.iloc[-1] - started.iloc[0] - evaluated) / (len(rows) - 1),
        "generation": waited[steady].median(),  # of ahead=0
        "update": rows["time/update"][steady].median(),
        "tokens": rows["rollout/tokens"].mean(),
        "waits": waited[steady].sum() / cycle[steady].sum(),
        "idle": idle[steady].sum() / cycle[steady].sum(),
        "staleness": rows.get("rollout/staleness", waited * 0).mean(),
        "oldest": rows.get("rollout/staleness_max", waited * 0).max(),
    }


def allowed(case: str, arm: str, base: Mapping[str, float], own: Mapping[str, float]) -> float:
    """Return the speed-up that arithmetic allows. base, own: the `times` of ahead=0 and of this arm, with the same seed."""
    _, step, _, slots, _ = CASES[case]
    generation, update = base["generation"], base["update"]
    if arm.startswith("ahead"):
        return 1.0
    if arm.startswith("ready"):
        share, stretch = TAIL.get(case, (0.0, 1.0))
        generation = own["tokens"] * (1 + share * (stretch - 1)) * step / slots
    return (base["generation"] + update) / max(generation, update)


def table(case: str, metrics: Mapping[str, Mapping[int, pd.DataFrame]], found: pd.DataFrame) -> str:
    """Return a Markdown table. metrics: of each arm by seed; found: of `grpo.extras.report.comparison.compared`."""
    from grpo.extras.report.statistics import over_seeds

    level, by_arm = (
        CASES[case][4],
        {
            arm: {seed: times(run, int(re.search(r"\d", arm)[0])) for seed, run in of.items()}
            for arm, of in metrics.items()
        },
    )
    head = f"""| arm | seeds | s a rollout | whole | speed-up | allowed | trainer waits, % | engine idle, % | staleness: mean, max
        | accuracy at the end, % | tokens to {100 * level:.0f} % |""".replace("\n        ", " ")
    rows = [head, "|---" * (head.count("|") - 1) + "|"]

    def interval(values: list[float], form: str) -> str:
        mean, low, high, n = over_seeds(values)
        return f"{mean:{form}}" + (f" ({low:{form}} to {high:{form}})" if n > 1 else "")

    for arm, by_seed in by_arm.items():
        base = {seed: by_arm["ahead=0"][seed] for seed in by_seed if seed in by_arm.get("ahead=0", {})}
        mean = pd.DataFrame(by_seed.values()).mean()
        most = max(each["oldest"] for each in by_seed.values())
        cells = [arm, f"{len(by_seed)}", f"{mean['seconds']:.2f}", f"{mean['whole']:.2f}"]
        cells.append(interval([base[s]["seconds"] / by_seed[s]["seconds"] for s in base], ".2f") if base else "")
        cells.append(f"{np.mean([allowed(case, arm, base[s], by_seed[s]) for s in base]):.2f}" if base else "")
        cells += [f"{100 * mean['waits']:.0f}", f"{100 * mean['idle']:.0f}", f"{mean['staleness']:.2f}, {most:.0f}"]
        cells.append("{:.1f} ({:.1f} to {:.1f})".format(*100 * found.loc[arm, ["value", "low", "high"]]))
        there = [tokens_to(level, of) for of in metrics[arm].values()]
        never = sum(np.isnan(there))
        cells.append(interval([n for n in there if n == n], ",.0f") + (f", {never} never" if never else ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def tokens_to(level: float, metrics: pd.DataFrame) -> float:
    """Return the tokens that a run has sampled when it reaches an accuracy; NaN if it does not."""
    from teacher_recipes import reached

    points = pd.DataFrame({"accuracy": metrics["eval/accuracy"], "tokens": metrics["data/tokens"]})
    return reached(points.fillna({"tokens": 0.0}).dropna(), level)["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "asynchronous")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    places = {
        (arm, seed): given.folder.resolve() / given.case / arm.replace(" ", "-").replace("=", "-") / str(seed)
        for seed, arm in product(given.seeds, given.arms)
    }
    for (arm, seed), place in places.items():
        if not given.table:
            trained(given.case, arm, seed, place)
    from grpo.extras.report.comparison import compared
    from grpo.runs.run import Run

    runs: dict[str, dict[int, Run]] = {}
    for (arm, seed), place in places.items():
        if (place / "finished").exists():
            runs.setdefault(arm, {})[seed] = Run(place)
    found = compared({arm: list(of.values()) for arm, of in runs.items()})
    print(table(given.case, {arm: {s: run.metrics for s, run in of.items()} for arm, of in runs.items()}, found))


if __name__ == "__main__":
    main()
