"""A profile of a task's reward: what it says of given completions, and how long that takes.

    python -m grpo.rewards FILE.jsonl --task gsm8k --out OUT.jsonl

FILE has a row for each completion, with `completion` and what the reward needs: `gold`, the right answer, or the columns of the
task's own rows. OUT repeats them, each with outcome (right, wrong, no_answer, timeout, error), reward (null where nobody could
tell) and ms.
A sample to which no reward function applies has neither outcome nor reward.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo.apps.cli import explain, make_task, quiet
from grpo.env.messages import Message
from grpo.env.types import Action, Example, Reward, State, Step, Task, Trajectory
from grpo.rewards.combined import text_of
from grpo.rewards.math.grading import ALGEBRA
from grpo.rewards.row_task import RowTask
from grpo.rollout.rewarding import Scorer
from grpo.rollout.types import TIMEOUT
from grpo.system.errors import RewardError, UserError


def read(file: Path) -> list[dict]:
    """Rows with a completion each. Raises UserError that names the line."""
    if not file.is_file():
        raise UserError(f"there is no file {file}: give JSON lines with `completion` and `gold`")
    rows = []
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text_of(row["completion"])
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(f"{file}, line {number}: not a JSON object with `completion` ({error})") from error
        rows.append(row)
    if not rows:
        raise UserError(f"{file} is empty: give JSON lines with `completion` and `gold`")
    return rows


def with_gold(task: Task, row: dict) -> Example:
    """The row as one of the task's: `gold` stands where the task looks for the right answer."""
    return row | {getattr(task, "gold_column", None) or "gold": row["gold"]} if "gold" in row else row


def scored(task: Task, row: dict) -> tuple[Reward, RewardError | None, float]:
    """What the task gives a row, why it could not, and the milliseconds it took."""
    example = with_gold(task, row)
    try:
        state = task.build(example).start()
    except Exception:  # the question is not needed
        state = State(())
    trajectory = Trajectory((Step(state, Action(Message("assistant", text_of(row["completion"])))),))

    async def asked() -> tuple[list[Reward], RewardError | None]:
        scorer = Scorer(task, TIMEOUT)
        try:
            return await scorer(example, [trajectory])
        finally:
            scorer.calls.close()

    start = time.perf_counter()
    rewards, error = asyncio.run(asked())
    ms = 1000 * (time.perf_counter() - start)
    return Reward(math.nan, False, outcome="error") if error else rewards[0], error, ms


def profiled(task: Task, row: dict) -> dict:
    """The row with what the task says of it."""
    reward, error, ms = scored(task, row)
    graded = reward.outcome or ("right" if reward.correct else "wrong" if reward.known else None)
    said = {"outcome": graded, "reward": reward.value if reward.known else None, "ms": round(ms, 3)}
    return row | said | ({"message": str(error)} if error else {})


def report(rows: Sequence[dict], worst: int = 5) -> str:
    ms = np.array([row["ms"] for row in rows])
    middle, high = np.percentile(ms, [50, 95])
    counts = Counter(row["outcome"] for row in rows)
    lines = [
        f"{len(rows)} samples, ms each: median {middle:.3f}, 95 % {high:.3f}, worst {ms.max():.3f}",
        ", ".join(f"{name} {counts[name]}" for name in ("right", "wrong", "no_answer", "timeout", "error")),
        "the slowest:",
    ]
    for i in np.argsort(-ms)[:worst]:
        text = " ".join(text_of(rows[i]["completion"]).encode(errors="replace").decode().split())
        lines.append(f"  row {i + 1}: {ms[i]:.1f} ms, {rows[i]['outcome']}: {text[-80:]}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m grpo.rewards", description="Profile the reward of a task.")
    parser.add_argument("file", type=Path, help="JSON lines with `completion`, and `gold` or the columns of the task")
    parser.add_argument("--task", required=True, help="an option of conf/task")
    parser.add_argument("--out", type=Path, help="where the rows go with outcome, reward and ms")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the task, as on the command line of train.py")
    given = parser.parse_intermixed_args(arguments)
    rows = read(given.file)
    task = make_task([f"task={given.task}", *given.overrides], str(given.file))
    if isinstance(task, RowTask):
        try:
            task.check(with_gold(task, rows[0]), str(given.file))
        except LookupError as error:
            raise UserError(
                f"{given.file} has no {error}, which the task needs: give `gold`, or its own columns"
            ) from error
    ALGEBRA.start()  # what starts with the first sample is not its own time
    _, error, _ = scored(task, rows[0])
    if error is not None and isinstance(error.__cause__, KeyError):
        raise UserError(f"{given.file}, row 1 lacks a column that task={given.task} needs ({error})")
    done = [profiled(task, row) for row in rows]
    if given.out:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in done), encoding="utf-8")
    print(report(done))


if __name__ == "__main__":
    quiet()
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        line = explain(error, "train", sys.argv[1:])
        if line is None:
            raise
        sys.exit(f"error: {line}")
