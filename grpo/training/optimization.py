"""Settings of the optimization: the optimizer, its schedule, and limits of the update's memory."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.models.logprobs import Layout
from grpo.system import distributed
from grpo.system.distributed import full
from grpo.system.errors import UserError, plural
from grpo.system.memory import in_pieces
from grpo.system.output.users_code import is_own, of_user
from grpo.system.ranges import Count, NonNegative, Positive, Share, enforced, require
from grpo.training.meter import Means

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG = 1 << 20  # updates of a run in which every warm-up ends
MOST = 10_000  # steps of a schedule that are tried, in a tenth of a second
MESSAGE = 25 << 20  # as in DistributedDataParallel; a larger gradient goes alone


@enforced("optim")
@dataclass(frozen=True)
class Optimization:
    """How the policy is optimized.

    optimizer: from named parameters, or groups of them, to an Optimizer. groups: see `by_pattern`.
    schedule: called with optimizer and num_training_steps (the updates of the run); returns an LRScheduler.
    warmup_ratio: the share of the updates in which the learning rate rises; None: the schedule's num_warmup_steps.
    max_tokens_per_microbatch: tokens that go through the model at once, which affects memory only; a row is never cut. None: see
    `tokens_at_once`.
    max_grad_norm: larger gradients are scaled down to it; None: no clipping.
    layout: how tokens are packed, see `grpo.models.logprobs`; results are the same.
    gradient_checkpointing: see `recomputing`; None: where the forecast says that an update does not fit without it. offload: see
    `with_masters`.
    max_skipped: the run ends if so many updates in a row are skipped, because their gradient is not finite. skipped: the folder
    where they are written. loss_scale: its `made()` returns the scale of the loss, where passes compute in float16.
    """

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    schedule: Callable[..., LRScheduler]
    max_tokens_per_microbatch: Count | None = None
    max_grad_norm: Positive | None = 1.0
    layout: Layout = "shared_prompt"
    gradient_checkpointing: bool | None = False
    offload: bool = False
    max_skipped: Count = 3
    skipped: str = "skipped"
    warmup_ratio: Share | None = None
    loss_scale: Any = None
    groups: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.tried(LONG)  # finds a wrong name or value before a model is loaded

    def tokens_at_once(self, device: str) -> int:
        """Return the tokens that go through the model at once on a type of device, such as cuda. A CPU is as fast with fewer."""
        return self.max_tokens_per_microbatch or (2048 if device == "cpu" else 8192)

    def tried(self, num_updates: int, steps: int = 1) -> None:
        """Make `steps` steps of a run of num_updates on two small tensors, and on one for each group. Raises UserError."""
        part, hint = "optimizer", "it is built from the parameters as (name, tensor)"
        try:
            made = made_up()
            groups = [
                {"params": [(name, torch.zeros(1, 1, requires_grad=True))], **settings}
                for name, settings in (self.groups or {}).items()
            ]
            optimizer = self.optimizer([{"params": made}, *groups] if groups else made)
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"it gave {type(optimizer).__name__}, and must return a torch.optim.Optimizer")
            self.check_groups(optimizer)
            for p in learned_by(optimizer) if is_own(self.optimizer) else ():
                p.grad = torch.ones_like(p)
            optimizer.step()
            part, hint = "schedule", f"in a run of {plural(num_updates, 'update')}, after each of which it steps"
            schedule = self.built(optimizer, num_updates)
            optimizer.step()  # again, because the schedule wants a step after its own start
            for _ in range(steps):
                schedule.step()
        except UserError:
            raise
        except Exception as error:  # an optimizer's code may raise anything
            code = self.optimizer if part == "optimizer" else self.schedule
            raise UserError(f"optim.{part}{of_user(code, error)}: {error} ({hint})") from error

    def check_groups(self, optimizer: Optimizer) -> None:
        """Raise UserError for a setting of a group that the optimizer does not have, which it would ignore."""
        for name, settings in (self.groups or {}).items():
            for key, value in settings.items():
                if key not in {*optimizer.defaults, "part"}:  # `part` is the loss's, see `clipped`
                    listed = ", ".join(sorted(optimizer.defaults))
                    raise UserError(f"optim.groups: {name!r} has {key!r}, and the optimizer takes {listed}")
                if key in ("lr", "weight_decay"):
                    require(f"optim.groups.{name}.{key}", value, NonNegative)

    def make(self, named: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """Return the optimizer of named parameters. Raises UserError for a group without any."""
        return self.optimizer(by_pattern(named, self.groups))

    def scheduled(self, optimizer: Optimizer, num_updates: int) -> LRScheduler:
        """Return the schedule of a run, which has been tried to its end. Raises UserError."""
        self.tried(num_updates, min(num_updates, MOST))
        return self.built(optimizer, num_updates)

    def continued(self, optimizer: Optimizer, num_updates: int, updates: int) -> LRScheduler:
        """Return the schedule of a run after so many updates, for an optimizer that `set_changed` has prepared. Raises UserError
        if its settings need a state that the checkpoint lacks, as that of amsgrad."""
        trial = self.optimizer(named := made_up())
        for _, p in named:
            p.grad = torch.zeros_like(p)
        trial.step()
        for state in filter(None, map(optimizer.state.get, learned_by(optimizer))):  # as of a matrix, or as of a vector
            if missing := min((trial.state.get(p, {}).keys() - state.keys() for _, p in named), key=len):
                fix = "resume with those of the run, or start from its policy by model=path model.path=RUN/checkpoints/last"
                raise UserError(f"optim.optimizer: its settings need {min(missing)}, which the checkpoint lacks: {fix}")
        schedule = self.built(optimizer, num_updates)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")  # the steps were made before
            for _ in range(updates):
                schedule.step()
        return schedule

    def built(self, optimizer: Optimizer, num_updates: int) -> LRScheduler:
        """Return the schedule of a run."""
        warmup = {}
        if self.warmup_ratio is not None:
            warmup["num_warmup_steps"] = math.ceil(self.warmup_ratio * num_updates)
        return self.schedule(optimizer=optimizer, num_training_steps=num_updates, **warmup)


def made_up() -> list[tuple[str, Tensor]]:
    """Return two small parameters, on which optimizers are tried."""
    return [("weight", torch.zeros(1, 1, requires_grad=True)), ("bias", torch.zeros(1, requires_grad=True))]


def by_pattern(
    named: Iterable[tuple[str, Tensor]], groups: Mapping[str, Mapping[str, Any]] | None
) -> Iterable[tuple[str, Tensor]] | list[dict[str, Any]]:
    """Return named parameters in the form that optimizers take: as they are, or as groups with settings of their own.

    groups: settings, as lr or weight_decay, by a pattern of names (`*` is any text); the first pattern that fits a name counts,
    and what fits none is the first group. Raises UserError for a pattern without a parameter.
    """
    if not groups:
        return named
    members: dict[str | None, list[tuple[str, Tensor]]] = {None: [], **{pattern: [] for pattern in groups}}
    for name, p in named:
        members[next((pattern for pattern in groups if fnmatchcase(name, pattern)), None)].append((name, p))
    if empty := [pattern for pattern in groups if not members[pattern]]:
        names = [name for several in members.values() for name, _ in several]
        line = f"optim.groups: {empty[0]!r} fits no parameter that learns, or an earlier pattern has them all"
        raise UserError(f"{line}; there are {', '.join(names[:4])}, ... ({len(names)} in all)")
    return [
        {"params": several, **(groups[pattern] if pattern else {})} for pattern, several in members.items() if several
    ]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of an optimizer."""
    return [deepcopy({key: x for key, x in group.items() if key != "params"}) for group in optimizer.param_groups]


def set_changed(optimizer: Optimizer, now: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]]) -> None:
    """Set what differs between the settings `now` and `then` of each group of an optimizer that a checkpoint was loaded into; an
    optimizer may also keep a state there. The learning rates become those of `now`, before any step of the schedule."""
    for group, new, old in zip(optimizer.param_groups, now, [*then, *({} for _ in now)], strict=False):
        group.update({key: x for key, x in new.items() if key not in old or old[key] != x} | {"lr": new["lr"]})
        group.pop("initial_lr", None)


def learned_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def average_over_ranks(learned: Iterable[Tensor], device: torch.device) -> None:
    """Replace each gradient by its mean over all ranks. device: where messages between ranks are, of at most MESSAGE bytes."""
    gradients = [p.grad for p in learned if p.grad is not None] if distributed.world_size() > 1 else []
    for some in in_pieces(gradients, lambda grad: grad.nbytes, MESSAGE):
        total = distributed.all_sum(torch.cat([grad.to(device).flatten() for grad in some]))
        means = total.div_(distributed.world_size()).split([grad.numel() for grad in some])
        torch._foreach_copy_(some, [mean.view_as(grad) for mean, grad in zip(means, some, strict=True)])


def clipped(optimizer: Optimizer, most: float | None, means: Means, scale: "Unscaled") -> bool:
    """Scale the gradient of each part of the parameters down to the norm `most`; None: not at all. Notes the norms before as
    PART/grad_norm, and returns whether all are finite. A group of parameters has its part as a key, else it is of `loss`.

    scale: of the loss; it is taken out of the gradient first, and then changes by whether that is finite.
    """
    scale.unscale(learned_by(optimizer))
    if scale.used:
        means.add("loss/scale", scale.value)
    parts: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        parts.setdefault(group.get("part", "loss"), []).extend(group["params"])
    norms = {part: full(nn.utils.clip_grad_norm_(learned, most or torch.inf)) for part, learned in parts.items()}
    finite = all(norm.isfinite() for norm in norms.values())
    scale.note(finite)
    if scale.used:
        means.add("loss/overflowed", scale.halved)
    for part, norm in () if scale.halved else norms.items():
        means.add(f"{part}/grad_norm", norm)
    return finite


class Unscaled:
    """The loss where no pass computes in float16: its scale is 1. extras/optimizers/loss_scale.py has one that changes."""

    value, used, halved = 1.0, False, False

    def scaled(self, loss: Tensor, model: nn.Module) -> Tensor:
        return loss

    def unscale(self, learned: Iterable[Tensor]) -> None:
        pass

    def note(self, finite: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass
class TokensAtOnce:
    """The limit of tokens that go through the model at once. Mutable: `most` is halved when memory runs out."""

    most: int

    def fitting(self, gradients: Callable[[], T], zero_grad: Callable[[], None], longest: int) -> T:
        """Return gradients(). If memory runs out, drop what it added and call it again, with half as many tokens at once.

        longest: tokens of the longest row, which is never cut. Raises torch.OutOfMemoryError if less does not help, and with
        several devices, where the others have gone on.
        """
        while True:
            try:
                return gradients()
            except torch.OutOfMemoryError:
                if self.most <= longest or distributed.world_size() > 1:
                    raise
            zero_grad()
            torch.cuda.empty_cache()
            self.most = max(longest, self.most // 2)
            log.warning("out of memory: from now on optim.max_tokens_per_microbatch=%d", self.most)
