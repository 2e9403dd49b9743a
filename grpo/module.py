"""Layer 3 - GRPOModule: the update. `training_step` is the algorithm; everything it calls is a pure function of tensors.

Group Relative Policy Optimization, arXiv 2402.03300. Knows nothing of text, tasks, engines or rewards.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm import Algorithm
from grpo.data import PromptBatch
from grpo.errors import UserError
from grpo.logprobs import completion_logprobs
from grpo.policy import Reference
from grpo.rollout import SHUFFLE, derive_seed
from grpo.tokens import TokenBatch


@dataclass(frozen=True)
class Optimization:
    """optimizer: parameters to Optimizer. schedule: (optimizer=, num_training_steps=updates of the run) to LRScheduler.

    microbatch_size: rows that go through the model at once, a matter of memory only. max_grad_norm: 0 does not clip.
    """

    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    schedule: Callable[..., LRScheduler]
    microbatch_size: int = 16
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise UserError(f"optim.microbatch_size={self.microbatch_size} must be at least 1")
        try:  # on one number, to find a wrong name or value before a model loads
            optimizer = self.optimizer([torch.zeros(1, 1, requires_grad=True)])
            schedule = self.schedule(optimizer=optimizer, num_training_steps=1)
            optimizer.step()
            schedule.step()
        except (TypeError, ValueError) as error:
            raise UserError(f"optim: {error}") from error


class Means:
    """Running means by name, each weighted by what it was counted over."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        self.sums[name] += float(total)
        self.counts[name] += float(count)

    def result(self) -> dict[str, float]:
        return {name: total / max(self.counts[name], 1e-9) for name, total in self.sums.items()}


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
        self.policy = policy
        self.reference = Reference(policy) if algorithm.loss.needs_reference else None
        self.algorithm, self.optim, self.temperature, self.seed = algorithm, optim, temperature, seed
        self.num_updates = num_rollouts * algorithm.updates_per_rollout

    def configure_optimizers(self):
        optimizer = self.optim.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        return [optimizer], [self.optim.schedule(optimizer=optimizer, num_training_steps=self.num_updates)]

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, float]:
        """Learn from one rollout: num_epochs passes of num_minibatches updates. Returns what there is to log."""
        means = Means()
        tokens = self.freeze(batch.tokens)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, SHUFFLE, batch.rollout))
        for _ in range(self.algorithm.num_epochs):
            for minibatch in tokens.shuffled(generator).divide(self.algorithm.num_minibatches):
                self.update(minibatch, means)
        return means.result()

    @torch.no_grad()
    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Adds what stays fixed while the policy moves: the reference's log-probabilities and the old ones.

        With a single update the policy is still the old one when it gets there, so its own values serve (see `update`).
        """
        if self.reference is not None:
            with self.reference.model() as model:
                tokens = replace(tokens, reference_logprobs=self.logprobs_of(model, tokens))
        if self.algorithm.updates_per_rollout > 1:
            tokens = replace(tokens, old_logprobs=self.logprobs_of(self.policy, tokens))
        return tokens

    def logprobs_of(self, model: nn.Module, tokens: TokenBatch) -> Tensor:
        """[B, C], a microbatch at a time."""
        out = torch.zeros_like(tokens.rollout_logprobs)
        for start in range(0, len(tokens), self.optim.microbatch_size):
            rows = slice(start, start + self.optim.microbatch_size)
            values, _ = completion_logprobs(model, tokens.rows(rows), self.temperature)
            out[rows, : values.shape[1]] = values
        return out

    def update(self, minibatch: TokenBatch, means: Means) -> None:
        """One optimizer step on the loss of a minibatch, summed over its microbatches."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        minibatch = replace(minibatch, weights=self.algorithm.loss.weights(minibatch.mask))
        for microbatch in minibatch.split(self.optim.microbatch_size):
            logprobs, entropy = completion_logprobs(self.policy, microbatch, self.temperature)
            if microbatch.old_logprobs is None:
                microbatch = replace(microbatch, old_logprobs=logprobs.detach())
            loss, stats = self.algorithm.loss(logprobs, microbatch)
            self.manual_backward(loss)
            stats |= {
                "loss/entropy": entropy,
                "rollout/logprob_gap": (microbatch.old_logprobs - microbatch.rollout_logprobs).abs(),
            }
            for name, values in stats.items():
                means.add(name, values[microbatch.mask].sum(), microbatch.mask.sum())
        grad_norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.optim.max_grad_norm or torch.inf)
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

    # -- checkpoints: a run resumes only into the model it was made with

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["policy_shapes"] = self.policy_shapes()
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

    def policy_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.policy.state_dict().items()}
