"""The summary at the end of a run: its time, speed, memory and accuracy."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
) -> dict[str, str]:
    """Return what a run took and learned, by name.

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

    found = {"rollouts": str(len(learned)), "time": f"{clock(seconds)}, {seconds / len(learned):.3g} s a rollout"}
    found |= {f"  {name}": f"{clock(part)}, {percent(part / seconds, 0)}" for name, part in spent.items()}
    sums = {name: sum(row.get(kind, 0.0) for row in learned) for name, kind in WAITS.items()}
    calls = {name: part for name, part in sums.items() if part} | dict(calls)
    found |= {f"beside: {name}": f"{clock(part)}, {percent(part / seconds, 0)}" for name, part in calls.items()}
    found |= {"tokens/s": f"{tokens / busy:,.0f}", "memory, at most": f"{memory / 2**30:.2f} GiB"}
    if graded := [evaluation for evaluation in evaluations if evaluation.estimates["accuracy"].n]:
        # the evaluation before training last, so that a later policy that scores the same is the best
        kept = [evaluation for evaluation in [*graded[1:], graded[0]] if evaluation.rollout not in lost]
        best = max(kept, key=lambda evaluation: evaluation.estimates["accuracy"].value, default=None)
        for name, evaluation in (("first", graded[0]), ("best", best), ("last", graded[-1])):
            if evaluation is None:
                continue
            accuracy = share_with_interval(evaluation.estimates["accuracy"])
            found[f"held out, {name}"] = f"{accuracy} after {evaluation.rollout}"
    return found | {"warnings": ", ".join(warned) or "none"}


def in_short(found: Mapping[str, str]) -> dict[str, str]:
    """Return of a summary what a person reads first: what was learned, then what it took."""
    held = {name: value for name, value in found.items() if name.startswith("held out, ")}
    if "held out, best" in held and held["held out, best"] == held["held out, last"]:
        held["held out, last"] = f"{held.pop('held out, best')}, the best"
    parts = {name.strip(): value.rpartition(", ")[2] for name, value in found.items() if name.startswith("  ")}
    most = ", ".join(f"{name} {share.replace(' ', '')}" for name, share in parts.items() if share != "0 %")
    took = {
        "time": f"{found['time'].rpartition(', ')[2]}: {most}",
        "speed": f"{found['tokens/s']} tokens/s, at most {found['memory, at most']} of memory",
    }
    return held | took | {name: found[name] for name in ("warnings", "checkpoints/best") if name in found}


def panel(found: Mapping[str, str], title: str) -> Panel:
    """Return a summary in a frame."""
    rows = Table.grid(padding=(0, 2))
    for name, value in found.items():
        rows.add_row(Text(name, style="bold" if name.startswith("held out") else ""), Text(value))
    return Panel(rows, title=title, title_align="left")
