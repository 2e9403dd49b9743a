"""Who waited for whom in a run, from the sums of its times, and what to do about it, in words."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from grpo.system.metrics import percent

BOUND = 0.15  # share of the time from which a wait is worth a word
FEWEST = 3  # rollouts of which something can be said


def shares(learned: Sequence[Mapping[str, float]], ahead: int = 0) -> dict[str, float]:
    """Return the shares of the time between two handovers. learned: the metrics of each rollout, in order.

    rollout: the policy waited for samples, or sampled itself. idle: the engine had nothing to sample. weights: samples waited for
    weights. A rollout that follows an evaluation, during which nothing or everything is played, does not count, nor the first,
    nor the last `ahead`, which leave nothing to play. Empty for fewer than FEWEST rollouts.
    """
    played = learned[: len(learned) - ahead]
    rows = [row for before, row in pairwise(played) if "time/eval" not in before and "time/rollout" in row]
    total = sum(row.get(f"time/{kind}", 0.0) for row in rows for kind in ("rollout", "update", "sync"))
    if len(rows) < FEWEST or not total:
        return {}
    sums = {"rollout": "time/rollout", "idle": "time/engine_idle", "weights": "time/weights"}
    return {name: min(1.0, sum(row.get(kind, 0.0) for row in rows) / total) for name, kind in sums.items()}


def about_waits(
    learned: Sequence[Mapping[str, float]], ahead: int, apart: bool = True, order: str = "exact"
) -> list[str]:
    """Return what the waits of a run say about its settings, in words; nothing if all are short.

    ahead, order: as in `rollout`. apart: whether the engine has weights of its own, so that it can sample during an update.
    With ahead=0 engine and policy take turns, and the shorter turn is what can be saved. Otherwise there are three cases. The
    policy waits, and the engine is busy: samples come too slowly. Both wait: they wait for each other, and more rollouts ahead
    part them. The engine alone waits: the update is the slower one, and more rollouts ahead would only be older.
    """
    found = shares(learned, ahead)
    if not found or (not ahead and not apart):
        return []
    waits, idle, weights = (found[name] for name in ("rollout", "idle", "weights"))
    waited, idled = (
        f"the policy waited for samples {percent(waits, 0)} of the time",
        f"the engine was idle {percent(idle, 0)}",
    )
    if not ahead:
        saved = min(waits, 1 - waits)
        line = f"rollout.ahead=1 does both at once, and saves up to {percent(saved, 0)} of the time"
        return [f"sampling and learning took turns: {line}"] if saved >= BOUND else []
    if waits >= BOUND and idle >= BOUND:
        return [f"{waited}, and {idled}: rollout.ahead={ahead + 1}"]
    lines = []
    if waits >= BOUND:
        shared = "rollout.order=ready, with which rollouts share the engine"
        fuller = f"rollout.ahead={ahead + 1}, if the engine can sample more at a time"
        lines = [f"{waited}: one more server, or {fuller if order == 'ready' else shared}"]
    elif idle >= BOUND:
        spare = "fewer servers, or more devices for the update"
        return [f"{idled} of the time, and the policy hardly waited: {spare}; a larger rollout.ahead gains nothing"]
    if weights >= BOUND:
        lines.append(f"samples waited for new weights {percent(weights, 0)} of the time: a faster engine.sync")
    return lines
