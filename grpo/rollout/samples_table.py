"""Tables of samples: one flat row per sample, in a Parquet file."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.rows import brief, fingerprint
from grpo.env.messages import in_a_text
from grpo.env.tokens import Row, rows_of_turns
from grpo.rollout.types import Group, Sample
from grpo.system.errors import RolloutError
from grpo.system.files import replacing, strict_json

if TYPE_CHECKING:
    from grpo.objectives.batch import TokenBatch  # eval.py compare= must not import torch


def records(groups: Iterable[Group], **columns: Iterable[Iterable[Any]]) -> Iterator[dict]:
    """Yield one flat dict per sample; nested values are JSON text. columns: more values, in the shape of the groups."""
    for p, group in enumerate(groups):
        for s, sample in enumerate(group):
            trajectory = sample.trajectory
            first, last = (trajectory.steps[0], trajectory.steps[-1]) if trajectory.steps else (None, None)
            called = last.action.message.as_dict().get("tool_calls") if last else None
            yield {
                "prompt_index": p,
                "sample": s,
                "item": fingerprint(sample.example),
                "example": text(sample.example),
                "prompt": first.state.messages[-1].content if first else "",
                "messages": text([message.as_dict() for message in last.state.messages] if last else []),
                "completion": trajectory.answer,
                "tool_calls": text(called) if called else None,
                "end": trajectory.end,
                "env_error": trajectory.error,
                "reward": sample.reward.value,
                "correct": sample.reward.correct,
                "outcome": sample.reward.outcome,
                **{f"reward/{name}": value for name, value in sample.reward.parts.items()},
                **{f"extra/{name}": text(value) for name, value in (sample.reward.extra or {}).items()},
                **{name: values[p][s] for name, values in columns.items()},
                "tokens": sample.length,
                "turns": len(sample.turns),
                "truncated": trajectory.truncated,
                **({"age": sample.age} if sample.age else {}),
            }


def conversation_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all messages of a sample as texts, the policy's last one included. row: of a table of samples."""
    calls = {"tool_calls": json.loads(row["tool_calls"])} if row.get("tool_calls") else {}
    before = [{**message, "content": in_a_text(message["content"])} for message in json.loads(row["messages"])]
    return [*before, {"role": "assistant", "content": row["completion"], **calls}]


def text(value: Any) -> str:
    """Return a value as text: a text as it is, other values as JSON."""
    return value if isinstance(value, str) else strict_json(value, ensure_ascii=False, default=brief)


def golds(task: Any, groups: Iterable[Group]) -> dict[str, list]:
    """Return the column `gold` for `records`: the right answer as text, which the task's method `gold` returns; else None."""
    gold = getattr(task, "gold", lambda example: None)
    answers = [[gold(sample.example) for sample in group] for group in groups]
    return {"gold": [[None if answer is None else text(answer) for answer in group] for group in answers]}


def token_logprobs(groups: Iterable[Group]) -> dict[str, list]:
    """Return columns for `records`: the sampled token ids, turn after turn, and the engine's log-probabilities of them."""

    def of_tokens(sample: Sample, name: str) -> list:
        return [value for turn in sample.turns for value in getattr(turn.completion, name)]

    ids = [[of_tokens(sample, "ids") for sample in group] for group in groups]
    logprobs = [[of_tokens(sample, "logprobs") for sample in group] for group in groups]
    return {"token_ids": ids, "rollout_logprobs": logprobs}


def token_divergences(groups: Sequence[Group], size: int, tokens: "TokenBatch") -> dict[str, list]:
    """Return a column for `records`: the divergence to the teacher of each token of `token_logprobs`, NaN where there is none;
    None for the samples of other ranks. size: G, the samples of the largest group; tokens: this rank's."""
    turns: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for place, of_turns, values in zip(
        tokens.sample.tolist(), tokens.turn.tolist(), tokens.divergence.tolist(), strict=True
    ):
        turns[place] += [(turn, value) for turn, value in zip(of_turns, values, strict=True) if turn >= 0]
    values = {place: [value for _, value in sorted(pairs, key=itemgetter(0))] for place, pairs in turns.items()}
    return {"divergence": [[values.get(i * size + j) for j in range(len(group))] for i, group in enumerate(groups)]}


def replayable(groups: Iterable[Group], version: int) -> dict[str, list]:
    """Return columns for `records` that `source=file` reads: rows with their prompts, and the advantages that were given.
    version: see `versions_of_turns`."""
    rows = [[plain_rows(sample, version) for sample in group] for group in groups]
    advantages = [[sample.reward.advantage for sample in group] for group in groups]
    return {"rows": rows, "given_advantage": advantages}


def plain_rows(sample: Sample, version: int) -> list[dict[str, list]]:
    """Return the rows of a sample in the form of extras/sources/conversion.py."""
    from grpo.rollout.versions import versions_of_turns  # imports torch

    versions = versions_of_turns(sample, version)
    return [plain_row(row, sample, versions) for row in rows_of_turns(sample.turns)]


def plain_row(row: Row, sample: Sample, versions: Sequence[Sequence[int]]) -> dict[str, list]:
    """Return a row of a sample. versions: of each token of each turn."""
    read, left = len(row.prompt_ids), list(map(iter, versions))
    sampled, logprobs = [False] * read + [*row.sampled], [0.0] * read + [*row.logprobs]
    plain: dict[str, list] = {"ids": [*row.prompt_ids, *row.ids], "sampled": sampled, "logprobs": logprobs}
    plain["versions"] = [0] * read + [0 if k < 0 else next(left[k]) for k in row.turns]
    of_turns = [turn.completion.temperature for turn in sample.turns]
    if any(of_turns):
        plain["temperatures"] = [None] * read + [None if k < 0 else of_turns[k] for k in row.turns]
    return plain


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a Parquet file, completely or not at all. Rows may lack columns of other rows."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    with replacing(path) as new:
        pq.write_table(pa.table({name: [encodable(row.get(name)) for row in rows] for name in names}), new)


def encodable(value: Any) -> Any:
    """Return a value that a file can hold: the text of an exception may contain half a character."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@contextmanager
def saving_failures(file: Path) -> Iterator[None]:
    """Write the samples to `file` if their reward or environment fails, and add its name to the error."""
    try:
        yield
    except RolloutError as error:
        if not error.groups:
            raise
        from grpo.system import distributed  # imports torch

        if distributed.rank() == 0:
            write(file, records(error.groups))
        raise RolloutError(f"{error}; the samples so far are in {file}") from error
