"""MATH: competition problems with a formula for an answer, on five levels (arXiv 2103.03874)."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from grpo.data.rows import rows_where
from grpo.env.messages import Message
from grpo.env.types import Example, Reward, Split, Trajectory
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.grading.answers import boxed
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import AS_TEXT, NEXT_QUESTION, RowTask, chosen, templates
from grpo.system.errors import UserError

PROMPTS = templates(
    "Reason step by step, and put the final answer in \\boxed{}.",
    "What is the sum of the roots of $x^2 - 5x + 6 = 0$?",
    "$x^2 - 5x + 6 = (x - 2)(x - 3)$, so the roots are 2 and 3, and their sum is \\boxed{5}.",
)


def level(example: Example) -> int | None:
    """Return 1 to 5, from `5` or `Level 5`; None if a row has no level, or `Level ?`."""
    digits = "".join(filter(str.isdigit, str(example.get("level", ""))))
    return int(digits) if digits else None


class Math(RowTask):
    """Rows have `problem` and `solution` with its answer in a box, maybe also `answer` and `level`.

    levels: the levels to keep, null for all; every level also has its own accuracy (level_1 ... level_5). rows: further
    arguments of `Dataset`.
    """

    usual_weights = MappingProxyType({"format": 0.1})

    def __init__(
        self,
        path: str,
        prompt: str = "chat",
        rewards: Functions = ("correct", "format"),
        weights: Weights = None,
        solved: float = 1.0,
        levels: Sequence[Literal[1, 2, 3, 4, 5]] | None = None,
        **rows: Any,
    ) -> None:
        self.stop = NEXT_QUESTION if prompt in AS_TEXT else None
        self.template, self.levels = chosen(PROMPTS, prompt), levels
        self.kept: dict[Split, Sequence[Example]] = {}
        data = Dataset(path, ("problem", "solution"), "math", form=self.template, **rows)
        super().__init__(data, rewards, weights, solved)

    def examples(self, split: Split) -> Sequence[Example]:
        rows = super().examples(split)
        if self.levels is None:
            return rows
        if split not in self.kept:
            self.kept[split] = rows_where(lambda row: level(row) in self.levels, rows, ("problem", "level"))
        if not self.kept[split]:
            raise UserError(f"task.levels={list(self.levels)} leaves none of the {len(rows)} rows of split {split!r}")
        return self.kept[split]

    def messages(self, example: Example) -> tuple[Message, ...]:
        return self.template(example["problem"])

    def gold(self, example: Example) -> str | None:
        answer = example.get("answer")
        return boxed(example.get("solution") or "") if answer in (None, "") else answer

    def score_group(self, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward]:
        rewards = super().score_group(example, trajectories)
        if (number := level(example)) is None:
            return rewards
        named = f"level_{number}"
        return [replace(r, parts={**r.parts, named: float(r.correct)}) if r.known else r for r in rewards]
