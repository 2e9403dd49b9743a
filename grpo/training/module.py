"""GRPOModule: the update. `training_step` is the algorithm; everything it calls is a pure function of tensors.

Group Relative Policy Optimization, arXiv 2402.03300. Knows nothing of text, tasks, engines or rewards.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.master_weights import LOW, with_masters
from grpo.models.packing import microbatches, trusted
from grpo.models.policy import Reference
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.entropy import threshold
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.seeds import SHUFFLE, derive_seed
from grpo.training.batch import RolloutBatch

PROGRESS = ("updates", "entropy_coef", "last_entropy")  # of a GRPOModule, beside the weights


@dataclass(frozen=True)
class Optimization:
    """optimizer: named parameters to Optimizer. schedule: (optimizer=, num_training_steps=updates of the run) to LRScheduler.

    max_tokens_per_microbatch: how many go through the model at once, a matter of memory only; a row is never cut. layout: how
    they are laid out, see `grpo.logprobs`; the numbers are the same. max_grad_norm: 0 does not clip.
    gradient_checkpointing: see `recomputing`. offload: see `with_masters`.
    """

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    schedule: Callable[..., LRScheduler]
    max_tokens_per_microbatch: int = 8192
    max_grad_norm: float = 1.0
    layout: Layout = "shared_prompt"
    gradient_checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens_per_microbatch < 1:
            raise UserError(f"optim.max_tokens_per_microbatch={self.max_tokens_per_microbatch} must be at least 1")
        if self.layout not in get_args(Layout):
            raise UserError(f"optim.layout={self.layout} is not one of {', '.join(get_args(Layout))}")
        try:  # on two numbers, to find a wrong name or value before a model loads
            shapes = {"weight": (1, 1), "bias": (1,)}
            optimizer = self.optimizer([(name, torch.zeros(s, requires_grad=True)) for name, s in shapes.items()])
            schedule = self.schedule(optimizer=optimizer, num_training_steps=1)
            optimizer.step()
            schedule.step()
        except UserError:
            raise
        except Exception as error:  # whatever an optimizer of others raises
            raise UserError(f"optim: {error} (an optimizer is made of the parameters as (name, tensor))") from error


class Means:
    """Running means by name, each weighted by what it was counted over, and extremes (a name that ends in _min or _max)."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        self.sums[name] += float(total)
        self.counts[name] += float(count)

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """values: [B, C], counted where the mask [B, C] is True."""
        self.add(name, values[mask].sum(), mask.sum())

    def add_extreme(self, name: str, values: Tensor) -> None:
        """name ends in _min or _max."""
        if values.numel():
            smaller = name.endswith("_min")
            value = float(values.min() if smaller else values.max())
            self.extremes[name] = (min if smaller else max)(value, self.extremes.get(name, value))

    def result(self) -> dict[str, float]:
        """Over all ranks. A mean of nothing is left out."""
        sums, counts, extremes = defaultdict(float), defaultdict(float), {}
        for other in distributed.all_gather([self]):
            for name, value in other.sums.items():
                sums[name] += value
                counts[name] += other.counts[name]
            for name, value in other.extremes.items():
                extremes[name] = (min if name.endswith("_min") else max)(value, extremes.get(name, value))
        return {name: value / counts[name] for name, value in sums.items() if counts[name]} | extremes


def of_samples(values: Tensor, tokens: TokenBatch, shape: tuple[int, int]) -> Tensor:
    """The mean of `values` [B, C] over the tokens of each sample, as `shape` [N, G]; 0 for one without tokens in the mask."""
    sums = torch.zeros(2, shape[0] * shape[1], device=values.device)
    of_rows = torch.stack([(values * tokens.mask).sum(1), tokens.mask.sum(1).float()])
    total, count = distributed.all_sum(sums.index_add(1, tokens.sample, of_rows))
    return (total / count.clamp(min=1)).view(shape)


class GRPOModule(L.LightningModule):
    """policy: the model that learns. temperature: the one its completions are sampled at. num_rollouts: of the whole run."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        optim: Optimization,
        temperature: float,
        num_rollouts: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # what an adapter leaves frozen is not in the checkpoint
        if optim.gradient_checkpointing:
            layers_of(policy)  # or say now that it cannot be
        self.policy = policy
        self.reference = Reference(policy, moves=algorithm.kl.sync_every > 0) if algorithm.kl.needs_reference else None
        self.algorithm, self.optim, self.temperature, self.seed = algorithm, optim, temperature, seed
        self.num_updates = num_rollouts * algorithm.updates_per_rollout
        self.updates = 0  # so far
        self.moved = False  # since the rollout
        self.entropy_coef, self.last_entropy = algorithm.entropy.coef, math.inf

    def configure_optimizers(self):
        trained = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        optimizer = with_masters(trained, self.optim.optimizer, self.optim.offload)
        self.has_masters = self.optim.offload or any(p.dtype in LOW for p in trained.values())
        return [optimizer], [self.optim.schedule(optimizer=optimizer, num_training_steps=self.num_updates)]

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Learn from one rollout: num_epochs passes of num_minibatches updates. Returns what there is to log."""
        means = Means()
        tokens, scores = batch.tokens, batch.scores.to(batch.tokens.ids.device)
        if self.algorithm.kl.in_reward:
            tokens = self.freeze(tokens)
        tokens = self.algorithm.credit(scores, tokens)
        if not self.algorithm.kl.in_reward:
            tokens = self.freeze(tokens)
        if self.algorithm.top_entropy < 1:
            entropies = torch.cat(distributed.all_gather([tokens.old_entropy[tokens.mask].cpu()]))
            counted = tokens.mask & (tokens.old_entropy >= threshold(entropies, self.algorithm.top_entropy))
            tokens = replace(tokens, counted=counted)
        advantages = of_samples(tokens.advantages, tokens, scores.rewards.shape)
        batch.advantages = advantages.tolist()
        self.moved = False
        generator = torch.Generator().manual_seed(derive_seed(self.seed, SHUFFLE, batch.rollout))
        with recomputing(self.policy, self.optim.gradient_checkpointing):
            for _ in range(self.algorithm.num_epochs):
                for minibatch in self.minibatches(tokens, scores.rewards.shape, generator):
                    logprobs = self.update(minibatch, means)
                if tokens.old_logprobs is None and self.algorithm.old_policy == "trainer":
                    tokens = replace(tokens, old_logprobs=logprobs)  # of the only minibatch, so of every row
        counts = {"positive": float((advantages > 0).sum()), "negative": float((advantages < 0).sum())}
        return means.result() | {f"rollout/advantages_{sign}": count for sign, count in counts.items()}

    @torch.no_grad()
    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Adds what stays fixed while the policy moves: the reference's log-probabilities and the old ones.

        With a single update the policy is still the old one when it gets there, so its own values serve (see `update`).
        """
        if self.reference is not None:
            with self.reference.model() as model:
                reference_logprobs, _ = self.logprobs_of(model, tokens, self.live(tokens))
            tokens = replace(tokens, reference_logprobs=reference_logprobs)
        if self.algorithm.needs_old:
            every = self.algorithm.top_entropy < 1  # whose entropies are compared
            rows = torch.arange(len(tokens), device=tokens.ids.device) if every else self.live(tokens)
            old_logprobs, old_entropy = self.logprobs_of(self.policy, tokens, rows)
            tokens = replace(tokens, old_logprobs=old_logprobs, old_entropy=old_entropy)
        return tokens

    def minibatches(
        self, tokens: TokenBatch, shape: tuple[int, int], generator: torch.Generator
    ) -> Iterator[TokenBatch]:
        """The groups of all ranks in a random order, cut into pieces whose numbers of samples differ by one at most; of each
        piece this rank's rows. shape: N, G. A sample is in one piece with all of its rows; most groups are, and share their
        prompt."""
        if self.algorithm.num_minibatches == 1:
            yield tokens
            return
        prompts, size = shape
        shuffled = torch.randperm(prompts, generator=generator).argsort()[:, None] * size + torch.arange(size)
        places = shuffled.flatten()[tokens.sample.cpu()]  # of the rows
        order = places.argsort(stable=True)
        for piece in torch.arange(prompts * size).tensor_split(self.algorithm.num_minibatches):
            mine = order[torch.isin(places[order], piece)]
            yield tokens.rows(mine.to(tokens.ids.device)) if len(mine) else tokens.rows(slice(0, 1)).silenced()

    def live(self, tokens: TokenBatch) -> Tensor:
        """The rows by index that have something to teach."""
        rows = torch.arange(len(tokens), device=tokens.ids.device)
        if tokens.advantages is None or not self.algorithm.skips_zero_advantages:
            return rows
        return rows[tokens.advantages.any(dim=1)]

    def logprobs_of(self, model: nn.Module, tokens: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, [B, C] each, of these rows, a microbatch at a time; 0 on the others."""
        logprobs, entropy = torch.zeros_like(tokens.rollout_logprobs), torch.zeros_like(tokens.rollout_logprobs)
        for some in self.microbatches(tokens, rows) if len(rows) else ():
            values = completion_logprobs(model, tokens.rows(some), self.temperature, False, *self.layout)
            width = values[0].shape[1]
            logprobs[some, :width], entropy[some, :width] = values
        return logprobs, entropy

    @cached_property
    def layout(self) -> tuple[Layout, str]:
        """And its kernel; asked for when the policy is on its device."""
        return trusted(self.policy, self.optim.layout)

    def microbatches(self, tokens: TokenBatch, rows: Tensor) -> list[Tensor]:
        """These rows by index, in pieces of what goes through the model at once."""
        pieces = microbatches(tokens.rows(rows), self.layout[0], self.optim.max_tokens_per_microbatch)
        return [rows[piece] for piece in pieces]

    def update(self, minibatch: TokenBatch, means: Means) -> Tensor:
        """One optimizer step on the loss of a minibatch, summed over its microbatches. Returns the log-probabilities before it,
        [B, C]; 0 on rows that were skipped."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        bonus = self.algorithm.entropy
        entropy_coef = bonus.applied(self.entropy_coef, self.last_entropy)
        # distributed.world_size(): their gradients get averaged
        minibatch = replace(
            minibatch, weights=self.algorithm.weights(minibatch.mask, minibatch.sample) * distributed.world_size()
        )
        live = self.live(minibatch)
        anywhere = distributed.all_sum(torch.tensor(float(len(live)), device=live.device))
        rows = minibatch
        if not len(live):  # every rank has a backward pass, every optimizer its step
            live = torch.zeros(1, dtype=torch.int64, device=live.device)
            if anywhere or minibatch.old_logprobs is not None:  # else the one row is there to be measured
                rows = minibatch.silenced()
        pieces = self.microbatches(rows, live)
        found = torch.zeros_like(minibatch.rollout_logprobs)
        # the trainer's log-probabilities of this very policy: later ones would tell of the updates in between
        fresh = minibatch.old_logprobs is not None or not self.moved
        of_update = Means()
        for i, piece in enumerate(pieces):
            microbatch = rows.rows(piece)
            logprobs, entropy = completion_logprobs(
                self.policy, microbatch, self.temperature, bonus.active, *self.layout
            )
            found[piece, : logprobs.shape[1]] = logprobs.detach()
            if microbatch.old_logprobs is None:
                microbatch = replace(microbatch, old_logprobs=logprobs.detach())
            loss, stats = self.algorithm.loss(logprobs, entropy, microbatch, entropy_coef)
            with self.gradients_stay() if self.has_masters or i < len(pieces) - 1 else nullcontext():
                self.manual_backward(loss)
            self.note(microbatch, logprobs.detach(), stats, means)
            if fresh:
                gap = (microbatch.old_logprobs - microbatch.rollout_logprobs).abs()
                means.add_tokens("rollout/logprob_gap", gap, microbatch.mask)
                means.add_extreme("rollout/logprob_gap_max", gap[microbatch.mask])
                for side in ("rollout_logprobs", "old_logprobs"):
                    means.add_tokens(f"rollout/{side}", getattr(microbatch, side), microbatch.mask)
            of_update.add_tokens("entropy", stats["entropy"], microbatch.mask)
        learned = [p for group in optimizer.param_groups for p in group["params"]]  # masters, where there are some
        if self.has_masters and distributed.world_size() > 1:  # DistributedDataParallel finds their gradients gone
            for p in learned:
                p.grad = (distributed.all_sum(p.grad.to(self.device)) / distributed.world_size()).to(p.device)
        grad_norm = nn.utils.clip_grad_norm_(learned, self.optim.max_grad_norm or torch.inf)
        if not grad_norm.isfinite():
            raise UserError(
                "the gradient is not finite, the policy was left as it is: lower optim.optimizer.lr or optim.max_grad_norm, "
                "and go on from the last checkpoint"
            )
        means.add("loss/grad_norm", grad_norm)
        means.add("lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        self.updates, self.moved = self.updates + 1, True
        if bonus.active:
            means.add("loss/entropy_coef", entropy_coef)
            self.last_entropy = of_update.result().get("entropy", self.last_entropy)
            self.entropy_coef = bonus.steered(self.entropy_coef, self.last_entropy)
        if (kl := self.algorithm.kl).sync_every and self.updates % kl.sync_every == 0:
            self.reference.move(kl.sync_alpha)
        return found

    def gradients_stay(self):
        """Context in which a backward pass leaves its gradients on this rank."""
        return self.trainer.strategy.block_backward_sync() if distributed.world_size() > 1 else nullcontext()

    def note(self, microbatch: TokenBatch, logprobs: Tensor, stats: dict[str, Tensor], means: Means) -> None:
        mask = microbatch.mask
        for name, values in stats.items():
            means.add_tokens(f"loss/{name}", values, mask)
        if "ratio" in stats:
            means.add_extreme("loss/ratio_min", stats["ratio"][mask])
            means.add_extreme("loss/ratio_max", stats["ratio"][mask])
        means.add_tokens("loss/logprobs_positive", logprobs, mask & (microbatch.advantages > 0))
        means.add_tokens("loss/logprobs_negative", logprobs, mask & (microbatch.advantages < 0))

    # -- checkpoints: a run resumes only into the model it was made with

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["policy_shapes"] = self.policy_shapes()
        checkpoint["progress"] = {name: getattr(self, name) for name in PROGRESS}
        if self.reference is not None and self.reference.moves:
            checkpoint["reference"] = self.reference.weights
        named = self.policy.named_parameters(remove_duplicate=False)  # tied weights under both names
        frozen = {f"policy.{name}" for name, parameter in named if not parameter.requires_grad}
        for name in frozen & checkpoint["state_dict"].keys():  # under an adapter the base is where it came from
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        theirs, ours = checkpoint["policy_shapes"], self.policy_shapes()
        different = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
        if different:
            name = different[0]
            raise UserError(
                f"ckpt_path is a checkpoint of another model: {len(different)} of {len(ours)} tensors differ, first {name} "
                f"({theirs.get(name, 'missing')} there, {ours.get(name, 'missing')} here); give the model= and adapter= of "
                "that run"
            )
        for name, value in checkpoint.get("progress", {}).items():
            setattr(self, name, value)
        if self.reference is not None and self.reference.moves and "reference" in checkpoint:
            self.reference.load(checkpoint["reference"])

    def policy_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.policy.state_dict().items()}
