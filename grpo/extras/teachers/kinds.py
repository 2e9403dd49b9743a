"""Teachers: where a second set of log-probabilities or of tokens comes from. conf/teacher has one choice for each class."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.teachers.divergence import Distributions, Predicted, own_head
from grpo.extras.teachers.offloaded import Kept, kept_of, visiting
from grpo.extras.teachers.teaching import Teaching
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Kernel
from grpo.models.packing import in_microbatches, trusted
from grpo.models.policy import Reference
from grpo.models.pretrained import Pretrained, context_of, differing_tokens
from grpo.models.states import states_before
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.system.distributed import one_pass
from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatch

REMEDY = "a teacher scores the policy's token ids, so take a model with the policy's tokenizer"


@dataclass(frozen=True)
class Passes:
    """How a teacher reads. temperature: of the run. layout: the one that the run wants. most: tokens of a pass. top_k: the
    entries of a distribution that are compared; None: all."""

    temperature: float
    layout: Layout = "padded"
    most: int = 1 << 14
    top_k: int | None = None


class Teacher:
    """No teacher but the tokens of a rollout (teacher=tokens), and the base of all teachers."""

    has_model = False  # whether it scores tokens
    limit: int | None = None  # most tokens of a row that it reads; None: any
    policy: nn.Module
    device: str | None = None  # of its passes; None: the policy's
    offload = False  # whether it is in the CPU's memory between its passes
    trusted: tuple[Layout, Kernel | None] | None = (
        None  # the layout that gives correct results for its model, and its kernel
    )

    def check(self, teaching: Teaching, temperature: float) -> None:
        """Raise UserError if it cannot give what the divergence compares. Called before any model is loaded."""
        if teaching.coef and not self.has_model:
            line = "but this teacher scores no tokens: take teacher=model or another, or coef=0"
            raise UserError(f"algo.teacher.coef={teaching.coef}, {line}")
        if self.has_model and not teaching.coef:
            line = "so the policy would not learn from the teacher: raise it (algo=opd has 1.0), or take teacher=none"
            raise UserError(f"algo.teacher.coef=0, {line}")

    def attach(self, policy: nn.Module) -> None:
        """Called when the policy is made, on whatever device it is; on the meta device for a forecast."""
        self.policy = policy

    @property
    def place(self) -> torch.device:
        """The device of its passes."""
        return torch.device(self.device or self.policy.device)

    def own(self, phase: str = "") -> list[Tensor]:
        """Return the tensors that it holds in memory beside the policy's, see `UpdatePart`."""
        return []

    def extended(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Return this rank's tokens with more rows, and which tokens are demonstrations, [B, C] bool; None: none."""
        return tokens, None

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Return what the teacher reads: the same completions after its own prompts; and the rows that it can read, [B] bool;
        None: all."""
        return tokens, None

    def by_name(self, row: Tensor) -> dict[str, Tensor]:
        """Return which of the rows each of several teachers judges, [b] bool by its name. row: places in the rollout, [b]."""
        return {}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """Yield the model, on its device. Until the end of the `with`, the policy may hold the teacher's weights."""
        raise NotImplementedError
        yield

    def layout(self, model: nn.Module, passes: Passes) -> tuple[Layout, Kernel | None]:
        """Return the layout of its passes, and its kernel."""
        if self.trusted is None:
            self.trusted = trusted(model, passes.layout)
        return self.trusted

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        """Return the log-probabilities of the tokens in the mask, [B, C] float32; 0 outside it."""
        self.check_lengths(read)
        logprobs, rows = torch.zeros_like(read.rollout_logprobs), read.mask.any(1).nonzero()[:, 0]
        with self.model() as model:
            layout, read = self.layout(model, passes), read.to(self.place)
            for indices, microbatch in in_microbatches(read, rows, layout[0], passes.most, model):
                values, _ = one_pass(model, completion_logprobs, microbatch, passes.temperature, False, *layout)
                logprobs[indices.to(logprobs.device), : microbatch.completion_width] = values.to(logprobs.device)
        return logprobs

    def distributions(self, read: TokenBatch, passes: Passes) -> Predicted:
        """Return what it predicts at the n tokens of the mask, which are few enough for one pass."""
        self.check_lengths(read)
        # asked here, since an adapter that is switched off does not seem to learn
        learns = any(p.requires_grad for p in self.policy.get_output_embeddings().parameters())
        with self.model() as model:
            layout = self.layout(model, passes)
            copied = self.offload or (model is self.policy and learns)  # the head is another one after this block
            return one_pass(model, distributions_of, read.to(self.place), copied, *layout)

    def prepare(self, read: TokenBatch, passes: Passes) -> None:
        """Called before the first `distributions` of a rollout, with all of its rows; the mask has all tokens that are asked for.
        A teacher that moves with the updates keeps nothing here, since it must hold for all of them."""

    def forget(self) -> None:
        """Drop what `prepare` has made. Called when the rollout has been learned from."""

    def moved(self) -> None:
        """Called after each update."""

    def check_lengths(self, read: TokenBatch) -> None:
        """Raise UserError if a row is too long for it."""
        longest = int((read.host or read).attention_mask.sum(1).max())
        if longest > (self.limit or longest):
            line = f"a row has {longest} tokens, and the teacher reads {self.limit}"
            raise UserError(f"{line}: lower max_tokens or prompt_limit.max_tokens, or take a teacher with more context")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def distributions_of(
    model: nn.Module, batch: TokenBatch, copied: bool, layout: Layout, kernel: Kernel | None
) -> Distributions:
    """Return the predictions of a model at each token of the mask. copied: it needs its own head, see `own_head`."""
    states = states_before(model.get_decoder(), batch, layout, kernel)
    return Distributions(model, states, own_head(model) if copied else None)


class Start(Teacher):
    """The policy as it was before training (teacher=reference)."""

    has_model = True

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.start = Reference(policy)
        if getattr(policy, "is_mapped", False) and self.start.copy is not None:  # whole on each rank
            self.start.copy.to(policy.config.get_text_config().dtype)

    def own(self, phase: str = "") -> list[Tensor]:
        return [] if phase else self.start.own()

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self.start.model() as model:
            yield model


class Model(Teacher):
    """Another model that reads the policy's tokens (teacher=model).

    student: the policy, whose tokens the model must have. device: cpu, cuda:1, ...; None: the policy's. offload: it is in the
    CPU's memory but for one visit to the device in each rollout. path: in place of the model's; name: of the keys.
    """

    has_model = True
    compares = False  # whether distributions are compared
    kept: Kept | None = None  # what it predicts in this rollout, if offloaded

    def __init__(
        self,
        model: Pretrained,
        student: Pretrained | None = None,
        device: str | None = None,
        offload: bool = False,
        path: str | None = None,
        name: str = "teacher",
    ) -> None:
        self.pretrained = replace(model, path=path or model.path, called=f"{name}.model" if path is None else name)
        if student is not None and student.vision:  # it sees what the policy sees
            sees = {name: getattr(student, name) for name in ("eyes", "pictures")}
            self.pretrained = replace(self.pretrained, vision="frozen", **sees)
        self.student, self.device, self.offload = student, device, offload

    def check(self, teaching: Teaching, temperature: float) -> None:
        super().check(teaching, temperature)
        self.compares = teaching.of_distributions

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        if self.student is not None:
            check_vocabulary(self.pretrained, self.student)
        self.limit = context_of(self.pretrained.config())
        imagined = next(policy.parameters()).is_meta  # for the memory forecast
        self.loaded = (self.pretrained.outline() if imagined else self.pretrained.model()).requires_grad_(False)
        rows = policy.config.get_text_config().vocab_size
        if self.loaded.config.get_text_config().vocab_size > rows:  # the padding of its vocabulary has no probability
            before = self.loaded.get_output_embeddings()  # maybe in float32, or without tokens of pictures
            self.loaded.resize_token_embeddings(rows).requires_grad_(False)
            head = self.loaded.get_output_embeddings()
            head.__class__, own = type(before), {name: x for name, x in vars(before).items() if name not in vars(head)}
            vars(head).update(own)

    def own(self, phase: str = "") -> list[Tensor]:
        if self.offload and phase == "update":  # its own head
            return [*map(torch.empty_like, self.loaded.get_output_embeddings().parameters())] if self.compares else []
        held = phase in (("scoring", "host") if self.offload else ("",))
        return [*self.loaded.parameters(), *self.loaded.buffers()] if held else []

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with visiting(self.loaded, self.place) if self.offload else nullcontext(self.loaded.to(self.place)) as model:
            yield model

    def prepare(self, read: TokenBatch, passes: Passes) -> None:
        if self.offload:  # it is frozen, so that no update changes what it predicts
            self.check_lengths(read)
            with self.model() as model:
                self.kept = kept_of(model, read, *self.layout(model, passes), passes.most, self.place)

    def forget(self) -> None:
        self.kept = None

    def distributions(self, read: TokenBatch, passes: Passes) -> Predicted:
        return super().distributions(read, passes) if self.kept is None else self.kept.at(read)


@cache
def check_vocabulary(teacher: Pretrained, student: Pretrained) -> None:
    """Raise UserError unless both tokenizers have the same tokens, ids and end token. Rows of the embedding beyond them may
    differ."""
    mine, other = student.tokenizer(), teacher.tokenizer()
    ours, theirs, ends = mine.get_vocab(), other.get_vocab(), (mine.eos_token, other.eos_token)
    what = f"{teacher.named} has another tokenizer than the policy"
    if differing := differing_tokens(ours, theirs):
        token = min(differing, key=lambda token: min(ours.get(token, 1 << 40), theirs.get(token, 1 << 40)))
        why = f"the policy's id of {token!r} is {ours.get(token)}, the teacher's {theirs.get(token)}, and {len(differing)} differ"
        raise UserError(f"{what}: {why}; {REMEDY}")
    if ends[0] != ends[1]:
        why = "the policy ends with {!r}, the teacher with {!r}, and the policy would unlearn to end".format(*ends)
        raise UserError(f"{what}: {why}; save the teacher's with the same eos_token")
    if student.vision and (why := mine.sight.unlike(other.sight)):
        raise UserError(
            f"{teacher.named} has another processor of pictures than the policy: {why}; take a model of its family"
        )
