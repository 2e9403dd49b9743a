"""Several teachers (teacher=several, MOPD, arXiv 2601.02780): a column of the row names the one that judges its tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.teachers.divergence import Joined
from grpo.extras.teachers.kinds import Model, Passes, Teacher
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Teaching
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.system.distributed import is_sharded
from grpo.system.errors import UserError
from grpo.system.memory import sent
from grpo.training.batch import RolloutBatch


class Several(Teacher):
    """One of several teachers for each row; none are averaged.

    column: of the example. teachers: by the column's value, each a Teacher, or the path from which `each` makes one. default: the
    name of the teacher of all other values; None: another value is an error.
    """

    has_model = True

    def __init__(
        self, column: str, teachers: Mapping[str, Any], each: Callable[..., Model], default: str | None = None
    ) -> None:
        self.column, self.default = column, default
        self.teachers: dict[str, Teacher] = {
            str(name): each(path=given, name=f"teacher.teachers.{name}") if isinstance(given, str) else given
            for name, given in teachers.items()
        }
        if default is not None and default not in self.teachers:
            raise UserError(f"teacher.default={default} is not among teacher.teachers: {', '.join(self.teachers)}")
        if own := [name for name, teacher in self.teachers.items() if type(teacher).reading is not Teacher.reading]:
            line = "reads a prompt of its own, and several teachers read the policy's"
            raise UserError(f"teacher.teachers.{own[0]} {line}: take it alone")

    def check(self, teaching: Teaching, temperature: float) -> None:
        for teacher in self.teachers.values():
            teacher.check(teaching, temperature)

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        for teacher in self.teachers.values():
            teacher.attach(policy)

    def own(self, phase: str = "") -> list[Tensor]:
        own = [teacher.own(phase) for teacher in self.teachers.values()]
        if phase == "scoring":  # one after the other
            return max(own, key=lambda tensors: sum(x.nbytes for x in tensors))
        return [x for tensors in own for x in tensors]

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Note which teacher each row has. Raises UserError for a value without one."""
        size, names = batch.scores.rewards.shape[1], list(self.teachers)
        examples = [batch.scores.examples[s // size] for s in tokens.sample.tolist()]
        self.owner = torch.tensor([names.index(self.named(example)) for example in examples])  # [B]
        return tokens, None

    def named(self, example: Mapping[str, Any]) -> str:
        """Return the name of the teacher of an example."""
        value = str(example.get(self.column))
        if value not in self.teachers and self.default is None:
            has = f"the value {value!r}" if self.column in example else f"no such column, only {', '.join(example)}"
            line = f"teacher.column={self.column}: a row has {has}, and teacher.teachers has {', '.join(self.teachers)}"
            raise UserError(f"{line}: add a teacher for it, or name one as teacher.default")
        return value if value in self.teachers else self.default

    def by_name(self, row: Tensor) -> dict[str, Tensor]:
        owner = sent(self.owner, row.device)[row]
        return {name: owner == i for i, name in enumerate(self.teachers)}

    def split(self, read: TokenBatch) -> list[tuple[Teacher, Tensor, TokenBatch]]:
        """Return each teacher that has rows, their indices, in the host's memory, and the rows."""
        if is_sharded(self.policy) and not all(
            t.own() or t.offload or isinstance(t, Served) for t in self.teachers.values()
        ):
            line = "teacher=reference with adapter=lora needs a pass of all devices at once"
            raise UserError(f"strategy=fsdp2: {line}, so it cannot be one of several: take strategy=ddp")
        owner = self.owner[(read.host or read).row.cpu()]
        owned = [(owner == i).nonzero()[:, 0] for i in range(len(self.teachers))]
        return [(t, rows, read.rows(rows)) for t, rows in zip(self.teachers.values(), owned, strict=True) if len(rows)]

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        logprobs = torch.zeros_like(read.rollout_logprobs)
        for teacher, rows, part in self.split(read):
            logprobs[rows.to(logprobs.device), : part.completion_width] = teacher.logprobs(part, passes)
        return logprobs

    def prepare(self, read: TokenBatch, passes: Passes) -> None:
        for teacher, _, part in self.split(read):
            teacher.prepare(part, passes)

    def forget(self) -> None:
        for teacher in self.teachers.values():
            teacher.forget()

    def distributions(self, read: TokenBatch, passes: Passes) -> Joined:
        split, owner = self.split(read), torch.zeros(len(read), dtype=torch.int64)
        mask = (read.host or read).mask.cpu()
        for i, (_, rows, _) in enumerate(split):
            owner[rows] = i
        owner = owner[:, None].expand(mask.shape)[mask]
        parts = [teacher.distributions(part, passes) for teacher, _, part in split]
        return Joined(parts, owner, read.ids.device)
