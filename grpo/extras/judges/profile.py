"""Profiles the reward of a task: outcomes of given completions, and the time for grading each.

    python -m grpo.rewards FILE.jsonl --task gsm8k --out OUT.jsonl

FILE has a row for each completion, with `completion` and the input of the reward: `gold`, the right answer, or the columns of
the task's own rows; and `completion_ids`, its tokens, if a reward function needs them. OUT has the same rows with outcome (right,
wrong, no_answer, timeout, error), reward (null if unknown) and ms. A sample to which no reward function applies has neither
outcome nor reward. Rows that follow each other with the same `group` are samples of one prompt, scored together. With `label`,
what people say of a completion (right or wrong as true or false, or the reward), the summary has the agreement with them.
"""

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from grpo.apps.cli import make_task
from grpo.env.intake import first_state
from grpo.env.messages import Message
from grpo.env.types import Action, Example, State, Step, Task, Trajectory
from grpo.extras.judges.agreement import cohen_kappa, correlation_inside, krippendorff_alpha
from grpo.rewards.combined import text_of
from grpo.rewards.row_task import RowTask
from grpo.rollout.rewarding import Scorer
from grpo.rollout.types import TIMEOUT
from grpo.system.errors import RewardError, UserError, plural
from grpo.system.files import strict_json


def read(file: Path) -> list[dict]:
    """Return the rows of a file, each with a completion. Raises UserError with the number of a bad line."""
    if not file.is_file():
        raise UserError(f"{file} does not exist: give a file of JSON lines with `completion` and `gold`")
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
                text_of(rows[-1]["completion"])
                float(rows[-1].get("label", 0))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                needs = "not a JSON object with `completion`, and with numbers as labels"
                raise UserError(f"{file}, line {number}: {needs} ({error})") from error
    if not rows:
        raise UserError(f"{file} is empty: give JSON lines with `completion` and `gold`")
    return rows


def with_gold(task: Task, row: dict) -> Example:
    """Return the row as an example of the task: `gold` is moved to the column that the task reads."""
    return row | {getattr(task, "gold_column", None) or "gold": row["gold"]} if "gold" in row else row


async def profiled(score: Scorer, rows: Sequence[dict]) -> tuple[list[dict], RewardError | None]:
    """Return the rows of a group with outcome, reward, parts and milliseconds, and the error if the task could not score them."""
    example = with_gold(score.task, rows[0])
    try:
        state = first_state(score.task, example)
    except Exception:  # most rewards do not need the question
        state = State(())
    texts, tokens = [text_of(row["completion"]) for row in rows], [tuple(row.get("completion_ids", ())) for row in rows]
    actions = [Action(Message("assistant", text), ids=ids) for text, ids in zip(texts, tokens, strict=True)]
    start = time.perf_counter()
    rewards, error = await score(example, [Trajectory((Step(state, action),)) for action in actions])
    ms = 1000 * (time.perf_counter() - start) / len(rows)
    done = []
    for row, reward in zip(rows, rewards, strict=True):
        graded = reward.outcome or ("right" if reward.correct else "wrong" if reward.known else None)
        columns = {"outcome": "error" if error else graded, "reward": reward.value if reward.known else None}
        columns |= {"ms": round(ms, 3)} | ({"parts": dict(reward.parts)} if reward.parts else {})
        done.append(row | columns | ({"message": str(error)} if error else {}))
    return done, error


async def profile(task: Task, rows: Sequence[dict], file: Path) -> list[dict]:
    """Return the rows with outcome, reward and milliseconds. Raises UserError if a column of the task is missing."""
    score = Scorer(task, TIMEOUT)
    if grader := getattr(task, "grader", None):
        grader.verdict("x+1", "1+x")  # start-up time, also that of a first call, does not count for any row
    _, error = await profiled(score, rows[:1])
    if error is not None and isinstance(error.__cause__, KeyError):
        raise UserError(f"{file}, row 1 lacks a column that the task needs ({error})")
    if error is not None and "completion_ids" not in rows[0] and re.search("'(completion_ids|lengths)'", str(error)):
        raise UserError(
            f"{file} has no tokens: give each row `completion_ids`, which a reward function needs ({error})"
        )
    groups = [[*some] for _, some in groupby(rows, lambda row: row.get("group", id(row)))]
    return [row for group in groups for row in (await profiled(score, group))[0]]


def report(rows: Sequence[dict], worst: int = 5) -> str:
    """Return a summary as text: times, outcomes, and the `worst` slowest rows."""
    ms = np.array([row["ms"] for row in rows])
    middle, high = np.percentile(ms, [50, 95])
    counts = Counter(row["outcome"] for row in rows)
    lines = [
        f"{plural(len(rows), 'sample')}, ms each: median {middle:.3f}, 95 % {high:.3f}, worst {ms.max():.3f}",
        ", ".join(f"{name} {counts[name]}" for name in ("right", "wrong", "no_answer", "timeout", "error")),
        "slowest:",
    ]
    for i in np.argsort(-ms)[:worst]:
        text = " ".join(text_of(rows[i]["completion"]).encode(errors="replace").decode().split())
        lines.append(f"  row {i + 1}: {ms[i]:.1f} ms, {rows[i]['outcome']}: {text[-80:]}")
    return "\n".join([*lines, *agreement([row for row in rows if row["reward"] is not None])])


def agreement(rows: Sequence[dict]) -> list[str]:
    """Return lines of rows with known rewards: agreement with the labels of people, correlation with length, mean parts."""
    lines, labelled = [], [row for row in rows if "label" in row]
    if labelled:
        labels = [float(row["label"]) for row in labelled]
        scores = [round(row["reward"], 6) for row in labelled]
        if {*labels} <= {0, 1}:
            scores = [float(row["outcome"] == "right") for row in labelled]
        same, kappa = np.mean(np.equal(labels, scores)), cohen_kappa(labels, scores)
        alpha = krippendorff_alpha([*zip(labels, scores, strict=True)])
        agree = f"agreement {same:.3f}, Cohen's kappa {kappa:.3f}, Krippendorff's alpha {alpha:.3f}"
        lines.append(f"{len(labels)} labels: {agree}")
    if any("label" in row or "group" in row for row in rows):
        groups = [row.get("group") for row in rows]
        lengths = [len(text_of(row["completion"])) for row in rows]
        bias = correlation_inside(groups, [row["reward"] for row in rows], lengths)
        lines.append(f"correlation of reward and length, inside groups: {bias:.3f}")
        parts = [row.get("parts", {}) for row in rows]
        names = sorted({name for some in parts for name in some})
        means = {name: np.mean([some[name] for some in parts if name in some]) for name in names}
        lines.append(", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    return lines


def main(arguments: Sequence[str]) -> None:
    """Run the program with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m grpo.rewards", description="Profile the reward of a task.")
    parser.add_argument("file", type=Path, help="JSON lines with `completion`, and `gold` or the columns of the task")
    parser.add_argument("--task", required=True, help="an option of conf/task")
    parser.add_argument("--out", type=Path, help="file for the rows with outcome, reward and ms")
    parser.add_argument("overrides", nargs="*", help="settings of the task, KEY=VALUE as for train.py")
    options = parser.parse_intermixed_args(arguments)
    rows = read(options.file)
    task = make_task([f"task={options.task}", *options.overrides], str(options.file))
    if isinstance(task, RowTask):
        try:
            task.check(with_gold(task, rows[0]), str(options.file))
        except LookupError as error:
            raise UserError(
                f"{options.file} has no {error}, which the task needs: add `gold` or that column"
            ) from error
    done = asyncio.run(profile(task, rows, options.file))
    if options.out:
        options.out.write_text("".join(strict_json(row) + "\n" for row in done), encoding="utf-8")
    print(report(done))
