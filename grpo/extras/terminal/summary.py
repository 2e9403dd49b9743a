"""The summary at the end of a run: its time, speed, memory and accuracy, as a table."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from rich.table import Table

from grpo.evaluation.display import share_with_interval
from grpo.evaluation.evaluator import Evaluation
from grpo.system.metrics import TIMES, percent

WAITS = {"rollouts ahead": "time/played", "engine idle": "time/engine_idle", "wait for weights": "time/weights"}
NEEDED = (*TIMES, *WAITS.values(), "rollout/tokens", "memory/rollout", "memory/update")  # metrics of a rollout


def clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))


def summary(
    learned: Sequence[Mapping[str, float]],
    evaluations: Sequence[Evaluation],
    seconds: float,
    warned: Sequence[str],
    checkpoint: float,
    calls: Mapping[str, float],
    lost: Collection[int] = (),
) -> Table:
    """Return the table of a run.

    learned: the metrics of each rollout, at least the NEEDED ones. seconds: duration of the whole run. warned: the metrics that
    had a warning. checkpoint: seconds of writing checkpoints. calls: seconds of environments and rewards, by their
    names, which other parts include. lost: the rollouts of policies that are not on the disk, so that none of them is the best.
    Accuracies are on the held-out examples, with a 95 % confidence interval for other examples of the same kind.
    """
    rows = [*learned, *(evaluation.metrics for evaluation in evaluations if evaluation.rollout == 0)]
    spent = {name.removeprefix("time/"): sum(row.get(name, 0.0) for row in rows) for name in TIMES}
    spent["checkpoint"] = checkpoint
    spent["rest"] = max(0.0, seconds - sum(spent.values()))
    tokens = sum(metrics["rollout/tokens"] for metrics in learned)
    busy = sum(spent[name] for name in ("rollout", "update", "sync"))
    memory = max(max(metrics["memory/rollout"], metrics["memory/update"]) for metrics in learned)

    table = Table("rollouts", str(len(learned)), title="the run")
    table.add_row("time", f"{clock(seconds)}, {seconds / len(learned):.3g} s a rollout")
    for name, part in spent.items():
        table.add_row(f"  {name}", f"{clock(part)}, {percent(part / seconds, 0)}")
    sums = {name: sum(row.get(kind, 0.0) for row in learned) for name, kind in WAITS.items()}
    calls = {name: part for name, part in sums.items() if part} | dict(calls)
    for name, part in calls.items():
        table.add_row(f"beside: {name}", f"{clock(part)}, {percent(part / seconds, 0)}")
    table.add_row("tokens/s", f"{tokens / busy:,.0f}")
    table.add_row("memory, at most", f"{memory / 2**30:.2f} GiB")
    if graded := [evaluation for evaluation in evaluations if evaluation.estimates["accuracy"].n]:
        # the evaluation before training last, so that a later policy that scores the same is the best
        kept = [evaluation for evaluation in [*graded[1:], graded[0]] if evaluation.rollout not in lost]
        best = max(kept, key=lambda evaluation: evaluation.estimates["accuracy"].value, default=None)
        for name, evaluation in (("first", graded[0]), ("best", best), ("last", graded[-1])):
            if evaluation is None:
                continue
            accuracy = share_with_interval(evaluation.estimates["accuracy"])
            table.add_row(f"held out, {name}", f"{accuracy} after {evaluation.rollout}")
    table.add_row("warnings", ", ".join(warned) or "none")
    return table
