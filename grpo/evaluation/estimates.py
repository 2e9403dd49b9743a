"""Computes the metrics of an evaluation, each with its interval."""

import asyncio
import logging
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import comb
from operator import eq
from threading import Thread
from typing import Any

import numpy as np
import pandas as pd

from grpo.env.types import Claim, Example, Task
from grpo.evaluation.intervals import Estimate, mean_interval
from grpo.rollout.rewarding import THREADS
from grpo.rollout.rollout_metrics import conversation, is_conversation
from grpo.rollout.samples_table import golds
from grpo.rollout.types import TIMEOUT, Group, Sample
from grpo.system.calls import Calls
from grpo.system.errors import error_line, plural
from grpo.system.metrics import about, name_of_part
from grpo.system.threads import beside

log = logging.getLogger(__name__)

Equal = Callable[[str, str], bool | None]  # whether two answers are the same; None: unknown
SHARE = (0.0, 1.0)
COUNTS = ("tool_calls", "tool_failures", "malformed_calls")  # counts of a conversation


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k), the unbiased estimate of the probability that at least one of k samples is right.

    n: the number of samples, c: the number of right ones. arXiv 2107.03374.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def all_of_k(n: int, c: int, k: int) -> float:
    """Return C(c, k) / C(n, k), the unbiased estimate of pass^k, the probability that all of k samples are right.

    n: the number of samples, c: the number of right ones. arXiv 2406.12045.
    """
    return comb(c, k) / comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool], equal: Equal = eq) -> float:
    """Return the probability that the most frequent answer is right; ties are broken at random. arXiv 2203.11171.

    Answers vote together if they are `equal`, or if a chain of equal answers joins them: 28, 28% and 0.28. So the order of the
    samples does not matter. A sample without an answer has no vote; without votes it is 0.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if isinstance(answer, str):  # pandas may have NaN for None
            votes.setdefault(answer, []).append(is_right)
    classes: list[dict[str, list[bool]]] = []  # of equal answers
    for answer, verdicts in votes.items():
        joined = [each for each in classes if any(equal(answer, other) or equal(other, answer) for other in each)]
        classes = [each for each in classes if each not in joined] + [dict(ChainMap({answer: verdicts}, *joined))]
    if not classes:
        return 0.0
    counted = [[*chain.from_iterable(each.values())] for each in classes]
    most = max(map(len, counted))
    return float(np.mean([np.mean(verdicts) for verdicts in counted if len(verdicts) == most]))


def values_of(example: Example, names: Sequence[str]) -> dict[str, str]:
    """Return the named columns that an example has, as text. An example of a mixture also has the columns of its source's row."""
    outer = example if isinstance(example, Mapping) else {}
    inner = outer.get("example")
    row = {**(inner if isinstance(inner, Mapping) else {}), **outer}
    return {f"by/{name}": str(row[name]) for name in names if row.get(name) is not None}


def columns(task: Task, groups: Sequence[Group], by: Sequence[str] = ()) -> dict[str, list[list[Any]]]:
    """Return more columns for `records`, with None where one does not apply.

    gold: the right answer. answer: the claimed one. correct_lenient: whether a right answer is found anywhere in the completion.
    by/NAME: the example's column NAME. eval/NAME: counts of a conversation.
    """
    claims, failures = getattr(task, "claims", None), []
    calls = Calls(THREADS, f"claims of {type(task).__name__}")  # each thread waits for a process that does algebra

    async def row(sample: Sample) -> dict[str, Any]:
        claim: Claim | BaseException | None = None
        if claims and sample.trajectory.steps:
            claim = await calls.run(object(), TIMEOUT, claims, sample.example, sample.trajectory)
        values: dict[str, Any] = values_of(sample.example, by)
        if isinstance(claim, BaseException):  # the user's code failed or hangs; the evaluation works without it
            failures.append(error_line(claim))
        elif claim:
            values["answer"] = claim.answer
            if sample.reward.known and claim.lenient is not None:
                values["correct_lenient"] = sample.reward.correct or claim.lenient
        if is_conversation(sample):
            counts = conversation(sample.trajectory)
            values |= {f"eval/{name}": counts[name] for name in COUNTS}
        return values

    async def all_rows() -> list[list[dict[str, Any]]]:
        try:
            return await asyncio.gather(*(asyncio.gather(*map(row, group)) for group in groups))
        finally:
            calls.close()

    rows = beside(all_rows, Thread.join)
    if failures:
        log.warning(
            "claims failed on %s, the first: %s; no accuracy_lenient", plural(len(failures), "sample"), failures[0]
        )
    names = dict.fromkeys(name for group in rows for row in group for name in row)
    more = {name: [[row.get(name) for row in group] for group in rows] for name in names}
    return golds(task, groups) | more


def solved(samples: pd.DataFrame) -> pd.Series:
    """Return for each prompt_index the share of right samples among those whose reward is known; NaN if none is known."""
    right = samples["correct"].astype(float).where(samples["reward"].notna())
    return right.groupby(samples["prompt_index"]).mean()


def estimates(samples: pd.DataFrame, equal: Equal = eq) -> dict[str, Estimate]:
    """Return every metric of an evaluation with its interval, by its name without eval/.

    samples: `records` with the columns of `columns`, in any order. equal: whether two answers are one vote.
    Samples with an unknown reward are left out of every metric about right answers; problems with fewer than k
    known samples are left out of pass@k. Lenient accuracy and maj@n are given only if every known sample has them,
    so that they are over the same problems as accuracy.
    """
    problems = samples["prompt_index"]
    rewarded = samples["reward"].notna()

    def mean(values: pd.Series, bounds: tuple[float, float] | None = SHARE) -> Estimate:
        return mean_interval(values.astype(float).groupby(problems).mean(), bounds=bounds)

    correct = samples["correct"].astype(float).where(rewarded)
    metrics = {"accuracy": mean(correct)}
    graded = samples["correct_lenient"].notna() if "correct_lenient" in samples else rewarded & False
    claimed = graded.any() and graded[rewarded].all()
    if claimed:
        metrics["accuracy_lenient"] = mean(samples["correct_lenient"])
    # [problems, 2]: samples with a reward, right samples
    tally = correct.groupby(problems).agg(["count", "sum"]).astype(int).to_numpy()
    most = int(problems.value_counts().max())
    for name, formula in (("pass@", pass_at_k), ("pass^", all_of_k)):
        for k in powers(most):  # estimated from all n samples: "the first k" has the same mean, and a larger variance
            values = [formula(int(n), int(c), k) for n, c in tally if n >= k]
            metrics[f"{name}{k}"] = mean_interval(values, bounds=SHARE)
    if most > 1 and claimed:
        by_problem = samples[graded].groupby("prompt_index")
        votes = [majority(part["answer"], part["correct"], equal) for _, part in by_problem]
        metrics[f"maj@{most}"] = mean_interval(votes, bounds=SHARE)
    for name, values in averaged(samples):
        share = about(f"eval/{name}").unit in ("share", "reward") and values.dropna().isin((0, 1)).all()
        metrics[name] = mean(values, SHARE if share else None)
    return metrics


def powers(n: int) -> list[int]:
    """Return the k of pass@k: 2, 4, 8 ... below n, and n. For k = 1, pass@k is accuracy."""
    ks, k = [], 2
    while k < n:
        ks.append(k)
        k *= 2
    return [*ks, n] if n > 1 else ks


def averaged(samples: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """Yield the metrics that are plain means: the name, and a value for each sample, NaN if it has none."""
    yield "length", samples["tokens"]
    yield "truncated", samples["truncated"]
    if samples["outcome"].notna().any():
        for name in ("no_answer", "timeout", "error"):
            yield name, samples["outcome"] == name
    counts = [name for name in samples if name.startswith("eval/")]
    if counts:  # if one sample is a conversation, all count as conversations, some of one turn
        yield "turns", samples["turns"]
        for end in ("out_of_turns", "env_error", "env_timeout"):
            yield end, samples["end"] == end
        for name in counts:
            yield name.removeprefix("eval/"), samples[name].astype(float).fillna(0.0)
    for name in sorted(name for name in samples if name.startswith("reward/")):
        yield name_of_part(name.removeprefix("reward/")), samples[name].astype(float)


def as_json(metrics: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return estimates as values for JSON, named eval/NAME."""
    return {f"eval/{name}": number_and_interval(estimate) for name, estimate in metrics.items()}


def number_and_interval(estimate: Estimate) -> dict[str, float | None]:
    """Return the numbers of an estimate by name, with None for NaN, which JSON lacks."""
    numbers = {name: None if math.isnan(number) else float(number) for name, number in estimate._asdict().items()}
    return numbers | {"n": estimate.n}
