"""The metrics of a rollout that are known before the update."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo.env.types import Trajectory
from grpo.rollout.types import Group, Sample
from grpo.system.metrics import name_of_part

if TYPE_CHECKING:  # reading old runs must not import torch
    from grpo.objectives.batch import Scores


def rectangle(groups: Sequence[Group], value: Callable[[Sample], float], missing: float) -> list[list[float]]:
    """Return a number of each sample, N rows of G; `missing` where a group has fewer samples than the largest."""
    size = max(map(len, groups), default=0)
    rows = []
    for group in groups:
        row = [float(value(sample)) for sample in group]
        rows.append(row + [missing] * (size - len(row)))
    return rows


def rollout_metrics(groups: Sequence[Group], scored: "Scores") -> dict[str, float]:
    """Return the metrics of a rollout before the update, over all samples, including those that are left out of the batch.

    A part of the reward is named by `name_of_part`; its standard deviation is over the samples whose reward is known.
    """
    samples = [sample for group in groups for sample in group]
    parts = {name: values for name, values in scored.parts.items() if name != "correct"}  # the verdict, not a part
    if any("correct" in sample.reward.parts for sample in samples):
        verdicts = rectangle(groups, lambda sample: sample.reward.parts.get("correct", math.nan), math.nan)
        parts["correct"] = scored.rewards.new_tensor(verdicts).masked_fill(scored.rewards.isnan(), math.nan)
    parts = {name_of_part(name): values for name, values in parts.items()} | {"reward": scored.rewards}
    graded = {name: values[~values.isnan()] for name, values in parts.items()}
    stds = {name: float(values.std(correction=0)) if len(values) else math.nan for name, values in graded.items()}
    # the samples' parts come last: `scored` has NaN for the parts of a failed grader
    means = {name: float(values.nanmean()) for name, values in parts.items()} | sample_means(samples)
    means["reward"] = float(scored.rewards.nanmean())
    means["solve_rate"] = share_right(samples)
    means["tokens"] = float(scored.lengths.sum())
    if scored.rewards.shape[1] > 1:
        means["effective_groups"] = float(scored.has_signal().float().mean())
    means |= {f"{name}_std": std for name, std in stds.items()}
    return {f"rollout/{name}": value for name, value in means.items()}


def group_counts(learned: Sequence[Group], played: Sequence[Group], rounds: int) -> dict[str, float]:
    """Return how many groups a selection has left out of those that were played, in how many rounds, and how many of those that
    are learned from an earlier rollout has played, if any."""
    replayed = sum(any(sample.age for sample in group) for group in learned)
    counts = {"rounds": rounds, "discarded_groups": len(played) - len(learned) + replayed}
    counts |= {"replayed_groups": replayed} if replayed else {}
    return {f"rollout/{name}": float(count) for name, count in counts.items()}


def sample_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return means over the samples: length in tokens; the shares truncated and repeated; the shares no_answer, timeout and error
    if anything was graded; the counts of `conversation` if there are several turns or tools; each part of the reward, over the
    samples that have it."""
    graded = ("no_answer", "timeout", "error") if any(sample.reward.outcome for sample in samples) else ()
    conversations = any(map(is_conversation, samples))
    values: dict[str, list[float]] = {}
    for sample in samples:
        ours = {"length": sample.length, "truncated": sample.trajectory.truncated, "repeated": share_repeated(sample)}
        ours |= {name: sample.reward.outcome == name for name in graded}
        ours |= conversation(sample.trajectory) if conversations else {}
        parts = {name_of_part(name): value for name, value in sample.reward.parts.items()}
        for name, value in (parts | ours).items():
            values.setdefault(name, []).append(value)
    ordered = [*ours, *sorted(values.keys() - ours.keys())]
    return {name: float(np.mean(values[name])) for name in ordered}


def share_repeated(sample: Sample) -> float:
    """Return the share of an answer's runs of four tokens that came before in the same answer; 0 if it has none."""
    answers = [turn.completion.ids for turn in sample.turns]
    fours = sum(max(len(ids) - 3, 0) for ids in answers)
    distinct = sum(len({*zip(ids, ids[1:], ids[2:], ids[3:], strict=False)}) for ids in answers)
    return 1 - distinct / fours if fours else 0.0


def is_conversation(sample: Sample) -> bool:
    """Return whether the counts of `conversation` apply: several turns, tools, or a failed environment."""
    return len(sample.turns) != 1 or sample.trajectory.failed or bool(sample.trajectory.steps[0].state.tools)


def conversation(trajectory: Trajectory) -> dict[str, float]:
    """Return counts of one episode: turns; 1 for its end, if that is out_of_turns, env_error or env_timeout; tool calls, failed
    tool calls, 1 if tools were there and none was called, and messages whose call could not be parsed."""
    calls = sum(len(step.action.message.tool_calls) for step in trajectory.steps)
    messages = [step.action.message for step in trajectory.steps]
    return {
        "turns": len(messages),
        **{end: float(trajectory.end == end) for end in ("out_of_turns", "env_error", "env_timeout")},
        "tool_calls": calls,
        "no_tool_call": float(not calls and any(step.state.tools for step in trajectory.steps)),
        "tool_failures": sum(message.role == "tool" and bool(message.error) for message in trajectory.messages),
        "malformed_calls": sum(bool(message.error) for message in messages),
    }


def share_right(samples: Sequence[Sample]) -> float:
    """Return the share of right samples among those whose reward is known; NaN if none is known."""
    verdicts = [sample.reward.correct for sample in samples if sample.reward.known]
    return float(np.mean(verdicts)) if verdicts else math.nan
