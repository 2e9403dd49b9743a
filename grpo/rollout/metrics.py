"""The numbers that describe a rollout before anything is learned from it."""

import math
from collections.abc import Sequence

import numpy as np

from grpo.env.types import Trajectory
from grpo.objectives.advantage import has_signal
from grpo.objectives.batch import Scores
from grpo.rollout.types import Group, Sample


def sample_means(samples: Sequence[Sample]) -> dict[str, float]:
    """length in tokens; shares: truncated, and where anything was graded no_answer, timeout and error; of conversations also
    what `conversation` says; and every part of the reward by name, over the samples that have it."""
    graded = ("no_answer", "timeout", "error") if any(sample.reward.outcome for sample in samples) else ()
    conversations = any(len(sample.turns) != 1 or sample.trajectory.steps[0].state.tools for sample in samples)
    values: dict[str, list[float]] = {}
    for sample in samples:
        ours = {"length": sample.length, "truncated": sample.trajectory.truncated}
        ours |= {name: sample.reward.outcome == name for name in graded}
        ours |= conversation(sample.trajectory) if conversations else {}
        for name, value in {**sample.reward.parts, **ours}.items():  # no part of a reward takes our names
            values.setdefault(name, []).append(value)
    ordered = [*ours, *sorted(values.keys() - ours.keys())]
    return {name: float(np.mean(values[name])) for name in ordered}


def conversation(trajectory: Trajectory) -> dict[str, float]:
    """Of one episode the turns, whether they ran out, whether the environment raised (env_error) or took too long (env_timeout),
    the calls of tools, those that failed, and messages whose call could not be read."""
    said = [step.action.message for step in trajectory.steps]
    return {
        "turns": len(said),
        **{end: float(trajectory.end == end) for end in ("out_of_turns", "env_error", "env_timeout")},
        "tool_calls": sum(len(message.tool_calls) for message in said),
        "tool_failures": sum(message.role == "tool" and bool(message.error) for message in trajectory.messages),
        "malformed_calls": sum(bool(message.error) for message in said),
    }


def share_right(samples: Sequence[Sample]) -> float:
    """Of those whose reward is known; NaN if none is."""
    known = [sample.reward.correct for sample in samples if sample.reward.known]
    return float(np.mean(known)) if known else math.nan


def rollout_metrics(groups: list[Group], scored: Scores) -> dict[str, float]:
    """What can be said of a rollout before anything is learned from it, over every sample, those left out of the batch too."""
    samples = [sample for group in groups for sample in group]
    known = {**scored.parts, "reward": scored.rewards}
    graded = {name: values[~values.isnan()] for name, values in known.items() if name != "correct"}
    stds = {name: float(values.std(correction=0)) if len(values) else math.nan for name, values in graded.items()}
    # the samples' own parts come last: what a grader that failed says of itself is not known to `scored`
    means = {name: float(known[name].nanmean()) for name in stds} | sample_means(samples)
    means["reward"] = float(scored.rewards.nanmean())
    means["solve_rate"] = share_right(samples)
    means["tokens"] = float(scored.lengths.sum())
    if scored.rewards.shape[1] > 1:  # the share of groups that have something to teach
        means["effective_groups"] = float(has_signal(scored.rewards).float().mean())
    return {f"rollout/{name}": mean for name, mean in means.items()} | {
        f"rollout/{name}_std": std for name, std in stds.items()
    }
