"""Layer 3 - Samples: every rollout and every evaluation as JSON lines, for people and notebooks."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo import ranks
from grpo.data import PromptBatch
from grpo.errors import RolloutError
from grpo.rollout import Group


def records(groups: Iterable[Group], **columns: Iterable[Iterable[float]]) -> Iterable[dict]:
    """One flat dict a sample; `columns` are further values, in the shape of the groups."""
    for p, group in enumerate(groups):
        for s, sample in enumerate(group):
            trajectory = sample.trajectory
            said = trajectory.steps[-1] if trajectory.steps else None
            called = said.action.message.as_dict().get("tool_calls") if said else None
            yield {
                "prompt_index": p,
                "sample": s,
                "messages": [message.as_dict() for message in said.state.messages] if said else [],
                "completion": trajectory.answer,
                **({"tool_calls": called} if called else {}),
                "end": trajectory.end,
                **({"env_error": trajectory.error} if trajectory.error else {}),
                "reward": sample.reward.value,
                "correct": sample.reward.correct,
                "outcome": sample.reward.outcome,
                **{f"reward/{name}": value for name, value in sample.reward.parts.items()},
                **{name: values[p][s] for name, values in columns.items()},
                "tokens": sample.length,
                "turns": len(sample.turns),
                "truncated": trajectory.truncated,
            }


def write(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN
    known = ({name: None if value != value else value for name, value in row.items()} for row in rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in known)
    path.write_text(text, encoding="utf-8", errors="replace")  # an exception may tell of half a character


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
    """folder: gets rollouts/000001.jsonl and evaluations/000000.jsonl ..., numbered by rollouts learned from.

    every: rollouts between two that are written, 0 for none; evaluations are all written.
    """

    def __init__(self, folder: str, every: int = 1) -> None:
        self.folder, self.every = Path(folder), every

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: PromptBatch, batch_idx: int
    ) -> None:
        rollout = batch.rollout + 1
        if self.every and rollout % self.every == 0:
            columns = {"advantage": batch.advantages}
            if "overlong" in batch.scores.parts:
                columns["overlong"] = batch.scores.parts["overlong"].tolist()
            rows = records(batch.groups, **columns)
            write(self.folder / "rollouts" / f"{rollout:06d}.jsonl", ({"rollout": rollout, **row} for row in rows))
        for evaluation in batch.evaluations:
            rows = ({"rollout": evaluation.rollout, **row} for row in records(evaluation.groups))
            write(self.folder / "evaluations" / f"{evaluation.rollout:06d}.jsonl", rows)
