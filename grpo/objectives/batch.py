"""The tensors of an update: rows of tokens, and the rewards of their samples.

N prompts, G samples of each, S = N x G; B rows, P prompt tokens, C completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from grpo.objectives.advantage import has_signal
from grpo.system import distributed
from grpo.system.memory import sent


@dataclass(frozen=True)
class Scores:
    """The rewards of a rollout, sample by sample. NaN is an unknown reward."""

    rewards: Tensor  # [N, G] float32
    parts: Mapping[str, Tensor]  # [N, G] each, the named numbers that the rewards consist of, `correct` among them
    lengths: Tensor  # [N, G] float32, sampled tokens
    last_lengths: Tensor  # [N, G] float32, those of the last turn, which a limit may cut short; 0 without a turn
    truncated: Tensor  # [N, G] bool
    steps: Tensor | None = None  # [N, G, K] float32, rewards of turns; 0 for the last, which has the rest; NaN beyond
    examples: Sequence[Mapping[str, Any]] = ()  # N
    observations: Sequence[Sequence[Sequence[str]]] = ()  # N, G, K, what the policy read before each turn

    def _map(self, function) -> Self:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed = {name: function(tensor) for name, tensor in tensors.items()}
        return replace(self, parts={name: function(part) for name, part in self.parts.items()}, **changed)

    def to(self, device: torch.device) -> Self:
        return self._map(lambda tensor: sent(tensor, device))

    def has_signal(self, by: Literal["correct", "reward"] = "reward") -> Tensor:
        """Return whether the rewards of each group differ, or its answers are right and wrong ones, [N] bool."""
        return has_signal(self.rewards if by == "reward" else self.parts["correct"])

    def rows(self, index: list[int]) -> Self:
        """Return these groups."""
        lists = {name: [getattr(self, name)[i] for i in index] for name in ("examples", "observations")}
        return replace(self._map(lambda tensor: tensor[index]), **lists)

    def rewards_of_turns(self, rewards: Tensor) -> Tensor:
        """Return the rewards of turns, [N, G, K], whose sums are `rewards` [N, G]: the last turn has the rest."""
        steps = self.steps if self.steps is not None else torch.zeros_like(rewards)[..., None]
        last = (~steps.isnan()).sum(2, keepdim=True).sub(1).clamp(min=0)
        return steps.scatter_add(2, last, (rewards - steps.nansum(2))[..., None])


OF_ROWS = "sample", "fresh", "group", "row"  # fields that have a number for each row, [B]


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens for the loss. The module sets the fields that may be None, before the update that needs them."""

    ids: Tensor  # [B, P+C] int64
    attention_mask: Tensor  # [B, P+C] int64, 0 on padding
    mask: Tensor  # [B, C] bool, True where the policy sampled the token
    rollout_logprobs: Tensor  # [B, C] float32, the engine's
    sample: Tensor  # [B] int64, the row's sample, 0 to S - 1
    turn: Tensor | None = None  # [B, C] int64, the turn of its sample that sampled the token; -1 where none did
    given: Tensor | None = None  # [B, C] float32, advantages that came with the samples; NaN where there are none
    temperature: Tensor | None = None  # [B, C] float32, at which a token was sampled; 0 or None: the run's
    fresh: Tensor | None = None  # [B] bool, False in rows of earlier rollouts
    staleness: Tensor | None = None  # [B, C] float32, versions between the weights that sampled a token and the policy
    group: Tensor | None = None  # [B] int64, the row's prompt, 0 to N - 1
    advantages: Tensor | None = None  # [B, C] float32, 0 outside the mask
    old_logprobs: Tensor | None = None  # [B, C] the trainer's, before the first update on this batch
    old_entropy: Tensor | None = None  # [B, C] nats
    prob_squares: Tensor | None = None  # [B, C] the sum over the vocabulary of p^2, with old_logprobs
    reference_logprobs: Tensor | None = None  # [B, C]
    counted: Tensor | None = None  # [B, C] bool, the tokens that the surrogate counts; None: all
    values: Tensor | None = None  # [B, C] float32, the critic's, of the state before each token
    targets: Tensor | None = None  # [B, C] float32, what the values should be
    weights: Tensor | None = None  # [B, C] a token's share in the loss of one update, see `token_weights`
    row: Tensor | None = None  # [B] int64, the row's place in the rollout
    imitation: Tensor | None = None  # [B, C] the same in the cross-entropy with a text; 0 outside it
    teaching: Tensor | None = None  # [B, C] the same in the divergence to a teacher
    valuing: Tensor | None = None  # [B, C] the same in the errors of the values
    scored: Tensor | None = None  # [B, C] bool, the tokens of all terms of the loss; None: those of the mask
    teacher_logprobs: Tensor | None = None  # [B, C]
    divergence: Tensor | None = None  # [B, C] from the policy to the teacher, with gradient
    value_errors: Tensor | None = None  # [B, C] of the values, with gradient
    host: Self | None = None  # ids, masks and samples in the host's memory, see packing.with_host

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def completion_width(self) -> int:
        """C, the completion tokens of the longest row."""
        return self.mask.shape[1]

    @property
    def prompt_width(self) -> int:
        """P, the prompt tokens of the longest row."""
        return self.ids.shape[1] - self.completion_width

    def _map(self, function) -> Self:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})

    def to(self, *args, **kwargs) -> Self:
        """Apply `Tensor.to` to all tensors (Lightning calls this)."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))

    def rows(self, index: Tensor | slice) -> Self:
        """Return these rows, without the columns in which all of them are padding. index: in the host's memory."""
        place = index if isinstance(index, slice) else sent(index, self.ids.device)
        host = self.host and self.host._map(lambda tensor: tensor[index])
        return replace(self._map(lambda tensor: tensor[place]), host=host).trimmed()

    def sequences(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return each row's ids without padding: those of the prompt, and those after it."""
        host, width = self.host or self, self.prompt_width
        lengths = torch.stack([part.sum(1) for part in host.attention_mask.tensor_split([width], dim=1)], dim=1)
        return [
            (tuple(ids[width - prompt : width]), tuple(ids[width : width + completion]))
            for ids, (prompt, completion) in zip(host.ids.tolist(), lengths.tolist(), strict=True)
        ]

    def trimmed(self) -> Self:
        """Drop the columns in which every row is padding."""
        width, used = self.prompt_width, (self.host or self).attention_mask.any(dim=0).cpu()
        left, right = int(used[:width].int().argmax()), int(used[width:].sum())
        change = {name: getattr(self, name)[:, left : width + right] for name in ("ids", "attention_mask")}
        for name in {f.name for f in fields(self)} - {"ids", "attention_mask", "host", *OF_ROWS}:
            if (tensor := getattr(self, name)) is not None:
                change[name] = tensor[:, :right]  # [B, C]
        return replace(self, host=self.host and self.host.trimmed(), **change)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Return the values of samples [N, G], or of turns [N, G, K], on each of their tokens, [B, C]."""
        if values.dim() == 3:
            return values.flatten(0, 1)[self.sample[:, None], self.turn.clamp(min=0)]
        return values.flatten()[self.sample, None].expand(self.mask.shape)

    def by_sample(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the sums of `values` [B] over the rows of each sample, on all ranks, as `shape` [N, G]."""
        sums = torch.zeros(shape[0] * shape[1], device=values.device).index_add(0, self.sample, values)
        return distributed.all_sum(sums).view(shape)

    def sample_means(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the mean of `values` [B, C] over each sample's tokens in the mask, as `shape` [N, G]; 0 if it has none."""
        counts = self.by_sample(self.mask.sum(1).float(), shape)
        return self.by_sample((values * self.mask).sum(1), shape) / counts.clamp(min=1)

    def with_scored(self) -> Self:
        """Note in `scored` if a token outside of the mask is learned from: a text, or a sample without a reward."""
        terms = [weights > 0 for weights in (self.imitation, self.teaching) if weights is not None]
        if not terms or torch.equal(scored := torch.stack([self.mask, *terms]).any(0), self.mask):
            return self if self.scored is None else replace(self, scored=None)
        return replace(self, scored=scored)

    def passed(self) -> Self:
        """Return the rows of a pass, whose mask has the tokens of all terms."""
        return self if self.scored is None else replace(self, mask=self.scored)

    def silenced(self) -> Self:
        """Return the same rows, in no term of the loss: with an empty mask and advantages of 0."""
        nothing = torch.zeros_like(self.rollout_logprobs)
        rest = {
            "imitation": None,
            "teaching": None,
            "scored": None,
            "valuing": None if self.valuing is None else nothing,
        }
        return replace(self, mask=nothing.bool(), advantages=nothing, **rest)
