"""Layer 3 - Samples: every rollout and every evaluation as a table in a file, for people, notebooks and reports."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.utilities import rank_zero_only

from grpo import ranks
from grpo.data import PromptBatch
from grpo.errors import RolloutError
from grpo.rollout import Group, Sample
from grpo.rows import fingerprint


def records(groups: Iterable[Group], **columns: Iterable[Iterable[Any]]) -> Iterator[dict]:
    """One flat dict a sample; `columns` are further values, in the shape of the groups. What is nested is JSON text."""
    for p, group in enumerate(groups):
        for s, sample in enumerate(group):
            trajectory = sample.trajectory
            first, last = (trajectory.steps[0], trajectory.steps[-1]) if trajectory.steps else (None, None)
            called = last.action.message.as_dict().get("tool_calls") if last else None
            yield {
                "prompt_index": p,
                "sample": s,
                "item": fingerprint(sample.example),
                "prompt": first.state.messages[-1].content if first else "",
                "messages": json_text([message.as_dict() for message in last.state.messages] if last else []),
                "completion": trajectory.answer,
                "tool_calls": json_text(called) if called else None,
                "end": trajectory.end,
                "env_error": trajectory.error,
                "reward": sample.reward.value,
                "correct": sample.reward.correct,
                "outcome": sample.reward.outcome,
                **{f"reward/{name}": value for name, value in sample.reward.parts.items()},
                **{name: values[p][s] for name, values in columns.items()},
                "tokens": sample.length,
                "turns": len(sample.turns),
                "truncated": trajectory.truncated,
            }


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def token_logprobs(groups: Iterable[Group]) -> dict[str, list]:
    """Columns for `records`: the ids that the policy sampled, turn after turn, and the engine's log-probabilities of them."""

    def of(sample: Sample, name: str) -> list:
        return [value for turn in sample.turns for value in getattr(turn.completion, name)]

    names = {"token_ids": "ids", "rollout_logprobs": "logprobs"}
    return {column: [[of(sample, name) for sample in group] for group in groups] for column, name in names.items()}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A parquet file, whole or not at all. A row lacks what others have where it does not apply."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: [told(row.get(name)) for row in rows] for name in names}), f"{path}.new")
    os.replace(f"{path}.new", path)


def told(value: Any) -> Any:
    """An exception may tell of half a character, which no file takes."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@contextmanager
def on_disk(file: Path) -> Iterator[None]:
    """Leave there what was played when its reward or its environment fails, and say so."""
    try:
        yield
    except RolloutError as error:
        if ranks.rank() == 0:
            write(file, records(error.groups))
        raise RolloutError(f"{error}; what was played is in {file}") from error


class Samples(L.Callback):
    """folder: gets rollouts/000001.parquet and evaluations/000000.parquet ..., numbered by rollouts learned from.

    every: rollouts between two that are written, 0 for none; evaluations are all written. token_logprobs: also every token that
    was sampled, with the engine's log-probability of it.
    """

    def __init__(self, folder: str, every: int = 1, token_logprobs: bool = False) -> None:
        self.folder, self.every, self.token_logprobs = Path(folder), every, token_logprobs

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: PromptBatch, batch_idx: int
    ) -> None:
        rollout = batch.rollout + 1
        if self.every and rollout % self.every == 0:
            columns = {"advantage": batch.advantages}
            if "overlong" in batch.scores.parts:
                columns["overlong"] = batch.scores.parts["overlong"].tolist()
            self.write("rollouts", rollout, batch.groups, columns)
        for evaluation in batch.evaluations:
            self.write("evaluations", evaluation.rollout, evaluation.groups, {})

    def write(self, kind: str, rollout: int, groups: Sequence[Group], columns: dict[str, list]) -> None:
        columns |= token_logprobs(groups) if self.token_logprobs else {}
        rows = ({"rollout": rollout, **row} for row in records(groups, **columns))
        write(self.folder / kind / f"{rollout:06d}.parquet", rows)
