"""What is written of an episode: a flat row for each sample, in a parquet file."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.dataset import fingerprint
from grpo.rollout.types import Group, Sample
from grpo.system import distributed
from grpo.system.errors import RolloutError
from grpo.system.files import replacing


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
    with replacing(path) as new:
        pq.write_table(pa.table({name: [encodable(row.get(name)) for row in rows] for name in names}), new)


def encodable(value: Any) -> Any:
    """An exception may tell of half a character, which no file takes."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@contextmanager
def on_disk(file: Path) -> Iterator[None]:
    """Leave there what was played when its reward or its environment fails, and say so."""
    try:
        yield
    except RolloutError as error:
        if distributed.rank() == 0:
            write(file, records(error.groups))
        raise RolloutError(f"{error}; what was played is in {file}") from error
