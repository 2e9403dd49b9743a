"""Several teachers (teacher=several, MOPD, arXiv 2601.02780): a column of the row names the one that judges its tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo.models.divergence import Joined, Predicted
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.objectives.teaching import Teaching
from grpo.rollout.rollouts import Rollouts
from grpo.system.distributed import is_sharded
from grpo.system.errors import UserError
from grpo.teachers.kinds import Model, Passes, Start, Teacher
from grpo.training.batch import RolloutBatch


class Several(Teacher):
    """One of several teachers for each row; none are averaged.

    column: of the example. teachers: by the column's value, each a Teacher, a folder or hub id, or the keys of `each` that
    differ. each: the model of a teacher that is given by those. student, device, offload: of each, see `Model`. default: the name
    of the teacher of all other values; None: another value is an error.
    """

    has_model = True

    def __init__(
        self,
        column: str,
        teachers: Mapping[str, Any],
        each: Pretrained,
        student: Pretrained,
        default: str | None = None,
        device: str | None = None,
        offload: bool = False,
    ) -> None:
        def made(name: str, given: Any) -> Teacher:
            if isinstance(given, Teacher):
                return given
            settings = {"path": given} if isinstance(given, str) else dict(given)
            return Model(replace(each, **settings), student, device, offload, name=f"teacher.teachers.{name}")

        self.column, self.default = column, default
        self.teachers = {str(name): made(name, given) for name, given in teachers.items()}
        if default is not None and default not in self.teachers:
            raise UserError(f"teacher.default={default} is not among teacher.teachers: {', '.join(self.teachers)}")
        if own := [name for name, teacher in self.teachers.items() if type(teacher).reading is not Teacher.reading]:
            line = "reads a prompt of its own, and several teachers read the policy's"
            raise UserError(f"teacher.teachers.{own[0]} {line}: take it alone")

    def check(self, teaching: Teaching, temperature: float) -> None:
        super().check(teaching, temperature)
        for teacher in self.teachers.values():
            teacher.check(teaching, temperature)

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        for teacher in self.teachers.values():
            teacher.attach(policy)

    def own(self) -> list[Tensor]:
        return [tensor for teacher in self.teachers.values() for tensor in teacher.own()]

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Note which teacher each row has. Raises UserError for a value without one."""
        size = batch.scores.rewards.shape[1]
        examples = [batch.scores.examples[s // size] for s in tokens.sample.tolist()]
        names = list(self.teachers)
        self.owner = torch.tensor([names.index(self.named(example)) for example in examples])  # [B], by place
        return tokens, None

    def named(self, example: Mapping[str, Any]) -> str:
        """Return the name of the teacher of an example."""
        value = str(example.get(self.column))
        if value in self.teachers:
            return value
        if self.default is None:
            has = f"the value {value!r}" if self.column in example else f"no such column, only {', '.join(example)}"
            line = f"teacher.column={self.column}: a row has {has}, and teacher.teachers has {', '.join(self.teachers)}"
            raise UserError(f"{line}: add a teacher for it, or name one as teacher.default")
        return self.default

    def by_name(self, row: Tensor) -> dict[str, Tensor]:
        owner = self.owner[row.cpu()].to(row.device)
        return {name: owner == i for i, name in enumerate(self.teachers)}

    def split(self, read: TokenBatch) -> list[tuple[Teacher, Tensor, TokenBatch]]:
        """Return each teacher with the indices of its rows, in the host's memory, and these rows."""
        if is_sharded(self.policy) and any(isinstance(t, Start) and not t.own() for t in self.teachers.values()):
            line = "teacher=reference with adapter=lora needs a pass of all devices at once"
            raise UserError(f"strategy=fsdp2: {line}, so it cannot be one of several: take strategy=ddp")
        owned = [rows.cpu().nonzero()[:, 0] for rows in self.by_name(read.row).values()]
        return [
            (teacher, rows, read.rows(rows))
            for teacher, rows in zip(self.teachers.values(), owned, strict=True)
            if len(rows)
        ]

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        logprobs = torch.zeros_like(read.rollout_logprobs)
        for teacher, rows, part in self.split(read):
            logprobs[rows.to(logprobs.device), : part.completion_width] = teacher.logprobs(part, passes)
        return logprobs

    def distributions(self, read: TokenBatch, passes: Passes) -> Predicted:
        split = self.split(read)
        which = torch.zeros(len(read), dtype=torch.int64)
        for i, (_, rows, _) in enumerate(split):
            which[rows] = i
        owner = which.to(read.mask.device)[:, None].expand(read.mask.shape)[read.mask]
        return Joined([teacher.distributions(part, passes) for teacher, _, part in split], owner)

    def check_lengths(self, read: TokenBatch) -> None:
        for teacher, _, part in self.split(read):
            teacher.check_lengths(part)

    def rest(self) -> None:
        for teacher in self.teachers.values():
            teacher.rest()
