"""The metrics of an evaluation, each with its interval."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from grpo.env.types import Claim, Example, Task
from grpo.evaluation.statistics import Estimate, mean_interval
from grpo.rewards.math.answers import equal
from grpo.rollout.metrics import conversation, is_conversation
from grpo.rollout.rewarding import THREADS
from grpo.rollout.types import Group, Sample
from grpo.system.errors import told
from grpo.system.metrics import about, name_of_part

log = logging.getLogger(__name__)

SHARE = (0.0, 1.0)
COUNTS = ("tool_calls", "tool_failures", "malformed_calls")  # of a conversation
MOST_VALUES = 50  # a column with more of them makes no table


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that at least one of k is right, unbiased, from n samples with c right.

    arXiv 2107.03374.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def all_of_k(n: int, c: int, k: int) -> float:
    """C(c, k) / C(n, k): the chance that k of k are right, pass^k, unbiased. arXiv 2406.12045."""
    return comb(c, k) / comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """The chance that the most frequent answer is right, where ties are drawn by lot. arXiv 2203.11171.

    Answers vote together that are equal without algebra; who gives none does not vote, and where nobody does it is 0.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if isinstance(answer, str):  # a table of pandas' may have NaN for None
            same = next((other for other in votes if equal(answer, other)), answer)
            votes.setdefault(same, []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(given) for given in votes.values() if len(given) == most])) if votes else 0.0


def values_of(example: Example, names: Sequence[str]) -> dict[str, str]:
    """The named columns that an example has, as text. A row of a mixture also has the columns of its source's own row."""
    outer = example if isinstance(example, Mapping) else {}
    inner = outer.get("example")
    row = {**(inner if isinstance(inner, Mapping) else {}), **outer}
    return {f"by/{name}": str(row[name]) for name in names if row.get(name) is not None}


def columns(task: Task, groups: Sequence[Group], by: Sequence[str] = ()) -> dict[str, list[list[Any]]]:
    """Further columns for `records`, None where one does not apply: `answer`, the claimed answer; `correct_lenient`, whether it
    is right wherever it stands; `by/NAME`, the example's own column NAME; `eval/NAME`, counts of a conversation."""
    claims, failures = getattr(task, "claims", None), []

    def claim_of(sample: Sample) -> Claim | None:
        try:
            return claims(sample.example, sample.trajectory) if claims and sample.trajectory.steps else None
        except Exception as error:  # a user's code, and the evaluation stands without it
            failures.append(told(error))
            return None

    def of(sample: Sample) -> dict[str, Any]:
        found: dict[str, Any] = values_of(sample.example, by)
        if claim := claim_of(sample):
            found["answer"] = claim.answer
            if sample.reward.known and claim.lenient is not None:
                found["correct_lenient"] = sample.reward.correct or claim.lenient
        if is_conversation(sample):
            counts = conversation(sample.trajectory)
            found |= {f"eval/{name}": counts[name] for name in COUNTS}
        return found

    with ThreadPoolExecutor(THREADS) as pool:  # algebra is done by several processes
        submitted = [pool.map(of, group) for group in groups]
    rows = [list(found) for found in submitted]
    if failures:
        log.warning("claims failed on %d samples, the first: %s; no accuracy_lenient", len(failures), failures[0])
    names = dict.fromkeys(name for group in rows for row in group for name in row)
    return {name: [[row.get(name) for row in group] for group in rows] for name in names}


def solved(samples: pd.DataFrame) -> pd.Series:
    """By prompt_index the share of right samples among those whose reward is known, NaN where none is."""
    known = samples["correct"].astype(float).where(samples["reward"].notna())
    return known.groupby(samples["prompt_index"]).mean()


def estimates(samples: pd.DataFrame) -> dict[str, Estimate]:
    """Every metric of an evaluation with its interval, by name without eval/. samples: records with the columns above, any order.

    Samples with an unknown reward count for nothing that is about being right, and a problem with fewer than k known samples not
    for pass@k. Lenient accuracy and maj@n are there where every sample has them, so that they are of the same problems.
    """
    problems = samples["prompt_index"]
    known = samples["reward"].notna()

    def mean(values: pd.Series, bounds: tuple[float, float] | None = SHARE) -> Estimate:
        return mean_interval(values.astype(float).groupby(problems).mean(), bounds=bounds)

    correct = samples["correct"].astype(float).where(known)
    found = {"accuracy": mean(correct)}
    graded = samples["correct_lenient"].notna() if "correct_lenient" in samples else known & False
    claimed = graded.any() and graded[known].all()
    if claimed:
        found["accuracy_lenient"] = mean(samples["correct_lenient"])
    tally = correct.groupby(problems).agg(["count", "sum"]).astype(int).to_numpy()  # known, right
    most = int(problems.value_counts().max())
    for name, formula in (("pass@", pass_at_k), ("pass^", all_of_k)):
        for k in powers(most):
            values = [formula(int(n), int(c), k) for n, c in tally if n >= k]
            found[f"{name}{k}"] = mean_interval(values, bounds=SHARE)
    if most > 1 and claimed:
        votes = [majority(part["answer"], part["correct"]) for _, part in samples[graded].groupby("prompt_index")]
        found[f"maj@{most}"] = mean_interval(votes, bounds=SHARE)
    for name, values in averaged(samples):
        share = about(f"eval/{name}").unit in ("share", "reward") and values.dropna().isin((0, 1)).all()
        found[name] = mean(values, SHARE if share else None)
    return found


def powers(n: int) -> list[int]:
    """2, 4, 8 ... below n, and n: the k of pass@k. For k = 1 it is accuracy."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i < n} | ({n} if n > 1 else set()))


def averaged(samples: pd.DataFrame) -> Iterator[tuple[str, pd.Series]]:
    """The metrics that are plain means: name, and a value for each sample, NaN where it has none."""
    yield "length", samples["tokens"]
    yield "truncated", samples["truncated"]
    if samples["outcome"].notna().any():
        for name in ("no_answer", "timeout", "error"):
            yield name, samples["outcome"] == name
    counts = [name for name in samples if name.startswith("eval/")]
    if counts:  # where one sample is a conversation all are, some of them short
        yield "turns", samples["turns"]
        for end in ("out_of_turns", "env_error", "env_timeout"):
            yield end, samples["end"] == end
        for name in counts:
            yield name.removeprefix("eval/"), samples[name].astype(float).fillna(0.0)
    for name in sorted(name for name in samples if name.startswith("reward/")):
        yield name_of_part(name.removeprefix("reward/")), samples[name].astype(float)


def estimates_by_value(samples: pd.DataFrame) -> dict[str, dict[str, dict[str, Estimate]]]:
    """`estimates` for each value of each by/ column: column, value, name."""

    def natural(value: str) -> list:
        return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", value)]

    found = {}
    for name in (name for name in samples if name.startswith("by/")):
        parts = dict(list(samples.groupby(name)))
        if len(parts) <= MOST_VALUES:
            found[name.removeprefix("by/")] = {v: estimates(parts[v]) for v in sorted(parts, key=natural)}
    return found


def as_json(found: Mapping[str, Estimate]) -> dict[str, Any]:
    """Estimates for a file, by the names of metrics."""
    return {f"eval/{name}": number_and_interval(estimate) for name, estimate in found.items()}


def number_and_interval(estimate: Estimate) -> dict[str, float | None]:
    """NaN, which JSON lacks, is None."""
    return {name: None if math.isnan(number) else number for name, number in estimate._asdict().items()}
