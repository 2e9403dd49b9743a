"""The rows of a rollout: which of them go through the model, a microbatch at a time, and passes over them without a gradient."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Kernel
from grpo.models.packing import in_microbatches, trusted
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.distributed import one_pass
from grpo.training.meter import Means, note_engine
from grpo.training.module_state import ModuleState


class UpdateRows(ModuleState):
    """The part of GRPOModule that handles rows without learning from them."""

    def minibatches(self, tokens: TokenBatch, shape: tuple[int, int], rng: torch.Generator) -> Iterator[TokenBatch]:
        """Yield this rank's rows of each minibatch. The groups of all ranks are shuffled and cut into pieces whose numbers of
        samples differ by at most one; all rows of a sample are in one piece. shape: N, G."""
        if self.algorithm.num_minibatches == 1:
            yield tokens
            return
        prompts, size = shape
        # every rank draws the same order, so that several devices make the updates that one would make
        of_groups = torch.randperm(prompts, generator=rng).argsort()  # each group's place in a random order
        of_samples = (of_groups[:, None] * size + torch.arange(size)).flatten()
        places = of_samples[tokens.sample.cpu()]  # each row's
        order = places.argsort(stable=True)
        for piece in torch.arange(prompts * size).tensor_split(self.algorithm.num_minibatches):
            mine = order[torch.isin(places[order], piece)]
            yield tokens.rows(mine) if len(mine) else tokens.rows(slice(0, 1)).silenced()

    def live(self, tokens: TokenBatch) -> Tensor:
        """Return the indices of the rows that have a gradient, [n], in the host's memory."""
        rows, weights = torch.arange(len(tokens)), [tokens.imitation, tokens.teaching]
        if self.algorithm.policy_coef:
            if tokens.advantages is None or not self.algorithm.skips_zero_advantages:
                return rows
            weights.append(tokens.advantages)
        if tokens.values is not None:  # a critic learns from each row
            return rows
        live = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.ids.device)
        for of_tokens in (given for given in weights if given is not None):
            live |= of_tokens.any(dim=1)
        return rows[live.cpu()]

    def microbatches(self, tokens: TokenBatch, rows: Tensor) -> list[tuple[Tensor, TokenBatch]]:
        """Cut these rows, [n], into pieces that go through the model at once. Returns the indices, [b], and the rows of each."""
        return in_microbatches(tokens, rows, self.layout[0], self.at_once.most, self.policy)

    def to_learn(self, minibatch: TokenBatch) -> list[tuple[Tensor, TokenBatch]]:
        """Return the microbatches of an update: at least one, because every rank needs a backward pass. A rank without a live
        row passes its first row with an empty mask. If no rank has a live row and this pass must give the old log-probabilities,
        the mask stays."""
        live = self.live(minibatch)
        anywhere = distributed.all_sum(torch.full((), float(len(live)), device=minibatch.ids.device))
        if len(live):
            return self.microbatches(minibatch, live)
        measured = not anywhere and minibatch.old_logprobs is None
        return self.microbatches(minibatch if measured else minibatch.silenced(), torch.zeros(1, dtype=torch.int64))

    @cached_property
    def layout(self) -> tuple[Layout, Kernel | None]:
        """The layout that gives correct results for this policy, and its kernel. First read when the policy is on its device."""
        return trusted(self.policy, self.optim.layout)

    # -- passes without a gradient

    @torch.no_grad()
    def logprobs_of(self, model: nn.Module, tokens: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each, of these rows, by microbatches; 0 on the other rows."""
        logprobs, entropy = torch.zeros_like(tokens.rollout_logprobs), torch.zeros_like(tokens.rollout_logprobs)
        settings = self.temperature, False, *self.layout
        for indices, microbatch in self.microbatches(tokens.with_scored(), rows):
            width = microbatch.completion_width
            numbers = one_pass(model, completion_logprobs, microbatch.passed(), *settings)
            logprobs[indices, :width], entropy[indices, :width] = numbers
        return logprobs, entropy

    def compare(self, tokens: TokenBatch, means: Means) -> None:
        """Note the difference of engine and trainer on the first row, if the updates may not: they skip rows with advantage 0."""
        seen = self.algorithm.num_minibatches == 1 if tokens.old_logprobs is None else len(self.live(tokens)) > 0
        row = tokens.rows(slice(0, 1))  # no row means no pass, unless another rank needs one
        logprobs, _ = self.logprobs_of(self.policy, row, torch.arange(int(not seen)))
        if not seen:
            note_engine(means, replace(row, old_logprobs=logprobs))
