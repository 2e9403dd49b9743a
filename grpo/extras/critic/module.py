"""ActorCritic: the update with a critic, PPO (arXiv 1707.06347). Before an update the critic values every token, and the
advantage function compares the rewards with these values; in an update the critic learns what they should have been.

The critic is a value head on the policy's last hidden states, or a model of its own with a value head. Its loss is a mean over
the tokens of an update, on all ranks, and is added to the policy's. Its parameters are a group of the optimizer: their learning
rate is their own, and their gradient is clipped by itself.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from grpo.extras.critic.gae import value_loss, value_targets
from grpo.extras.critic.model import Critic, logprobs_and_states, states_before, states_disagreement
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import Layout
from grpo.models.packing import trusted
from grpo.models.pretrained import Pretrained
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores, TokenBatch
from grpo.system import distributed
from grpo.system.distributed import is_sharded, one_pass
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, Positive, Share, Whole, enforced
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.optimization import Optimization

NAMES = "critic."  # the names of the critic's parameters begin with this


@enforced("critic")
@dataclass(frozen=True)
class ValueLearning:
    """Settings of a critic: its model, and how it learns.

    model: below the value head; None: the policy. lr: learning rate of the critic's parameters, on the policy's schedule.
    coef: how much of the value loss's gradient goes into the policy below the head; 0: only the head learns from it.
    gamma, lam: of the values' targets, see `value_targets`; with lam 1 they are the discounted sums of rewards. clip: see
    `value_loss`. pretrain: the first rollouts, in which the critic learns with lam 1 and the policy stays as it is (VAPO, arXiv
    2504.05118).
    """

    model: Pretrained | None = None
    lr: NonNegative = 3e-3
    coef: NonNegative = 0.1
    gamma: Share = 1.0
    lam: Share = 1.0
    clip: Positive | None = 0.5
    pretrain: Whole = 0

    def critic(self, policy: nn.Module) -> Critic:
        """Return a new critic for the policy. Raises UserError if its model does not read the policy's tokens."""
        if self.model is None:
            dtype = next(p.dtype for p in policy.parameters() if p.requires_grad)
            return Critic(policy.get_output_embeddings().weight.shape[1], dtype)
        pretrained = replace(self.model, called="critic.model")
        config, ours = pretrained.config().get_text_config(), policy.config.get_text_config()
        if config.vocab_size < ours.vocab_size:
            line = f"has {config.vocab_size} tokens, the policy {ours.vocab_size}"
            raise UserError(f"critic.model.path={self.model.path} {line}: take a model with the policy's tokenizer")
        imagined = next(policy.parameters()).is_meta  # for the memory forecast
        model = pretrained.outline() if imagined else pretrained.model(getattr(policy, "is_mapped", False))
        head = model.get_output_embeddings().weight
        return Critic(head.shape[1], head.dtype, model.get_decoder().requires_grad_(True))


class ActorCritic(GRPOModule):
    """Learns from rollouts with a critic."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        optim: Optimization,
        temperature: float,
        num_rollouts: int,
        seed: int,
        critic: ValueLearning,
    ) -> None:
        of_critic = {f"{NAMES}*": {"lr": critic.lr, "part": "value"}}
        optim = replace(optim, groups={**of_critic, **(optim.groups or {})})
        super().__init__(policy, algorithm, optim, temperature, num_rollouts, seed)
        self.learning, self.critic = critic, critic.critic(policy)
        self.pretraining = False  # whether only the critic learns from this rollout
        self.values: Tensor | None = None  # [B, C] of the latest pass that learns, with gradient
        self.token_share = 1.0  # a token's weight in the value loss of this update

    def trained(self) -> dict[str, nn.Parameter]:
        return super().trained() | {f"{NAMES}{name}": p for name, p in self.critic.named_parameters()}

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        self.has_masters = self.by_hand
        return optimizers

    def policy_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {f"{NAMES}{name}": tuple(p.shape) for name, p in self.critic.named_parameters()}
        return super().policy_shapes() | shapes

    def live(self, tokens: TokenBatch) -> Tensor:
        """Return the indices of all rows, [B]: the critic learns from each."""
        return torch.arange(len(tokens))

    @cached_property
    def critic_layout(self) -> tuple[Layout, str]:
        """The layout that gives correct results for the critic's own model, and its kernel."""
        return trusted(self.critic.model, self.optim.layout, states_disagreement)

    # -- before the updates

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Value the tokens of a rollout, then learn from it."""
        self.pretraining = batch.rollout < self.learning.pretrain
        # DistributedDataParallel waits for gradients of all parameters, and then the policy has none
        self.by_hand = self.has_masters or (self.pretraining and not is_sharded(self.policy))
        coef = self.entropy.state_dict()
        has_body = self.critic.model is not None
        with recomputing(self.critic.model, has_body and self.optim.gradient_checkpointing):
            scores = batch.scores.to(batch.tokens.ids.device, non_blocking=True)
            tokens, returns = self.valued(batch.tokens, scores)
            batch.tokens = tokens
            metrics = super().training_step(batch, batch_idx)
        if self.pretraining:
            self.entropy.load_state_dict(coef)
        return metrics | value_metrics(tokens, returns)

    @torch.no_grad()
    def valued(self, tokens: TokenBatch, scores: Scores) -> tuple[TokenBatch, Tensor]:
        """Add the values, [B, C], and their targets. A pass of the policy also gives the old log-probabilities, if these are
        needed. Returns also the discounted sums of rewards, [B, C], which are NaN where the reward is."""
        logprobs, entropy, values = (torch.zeros_like(tokens.rollout_logprobs) for _ in range(3))
        settings = self.temperature, False, *self.layout
        for rows, microbatch in self.microbatches(tokens, self.live(tokens)):
            width, states = microbatch.completion_width, None
            if self.critic.model is None:
                *of_policy, states = one_pass(self.policy, logprobs_and_states, microbatch, *settings)
                logprobs[rows, :width], entropy[rows, :width] = of_policy
            values[rows, :width] = self.values_of(microbatch, states)
        if self.critic.model is None and self.algorithm.needs_old and not self.algorithm.takes("prob_squares"):
            tokens = replace(tokens, old_logprobs=logprobs, old_entropy=entropy)
        places = tokens.mask, tokens.sample, tokens.turn
        of_turns = scores.rewards_of_turns(scores.rewards)
        targets = partial(value_targets, scores.rewards, of_turns, values, *places, self.learning.gamma)
        lam = 1.0 if self.pretraining else self.learning.lam
        returns = targets(1.0)
        learned = returns if lam == 1 else targets(lam)
        return replace(tokens, values=values, targets=learned.nan_to_num(0.0)), returns

    def values_of(self, tokens: TokenBatch, states: Tensor | None) -> Tensor:
        """Return the values of a microbatch, [B, C], 0 outside of the mask. states: the policy's, [n, width]; None if the critic
        has a model."""
        if self.critic.model is not None:
            states = one_pass(self.critic.model, states_before, tokens, *self.critic_layout)
        return torch.zeros_like(tokens.rollout_logprobs).masked_scatter(tokens.mask, self.critic.head(states))

    # -- one update

    def gradients(self, minibatch: TokenBatch, alpha: float) -> tuple[Tensor, Means]:
        """Add the gradients of policy and critic. Returns the policy's log-probabilities, [B, C], and metrics."""
        count = distributed.all_sum(minibatch.mask.sum())
        self.token_share = distributed.world_size() / count.clamp(min=1)  # gradients of ranks are averaged
        return super().gradients(minibatch, alpha)

    def forward_pass(self, model: nn.Module, tokens: TokenBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each. In a pass that learns, the values are made, too."""
        if not torch.is_grad_enabled() or model is not self.policy:
            return super().forward_pass(model, tokens, entropy_gradient)
        states = None
        with torch.set_grad_enabled(not self.pretraining):
            if self.critic.model is None:
                settings = self.temperature, entropy_gradient, *self.layout
                logprobs, entropy, states = one_pass(model, logprobs_and_states, tokens, *settings)
                states = torch.lerp(states.detach(), states, self.learning.coef)  # scales the gradient alone
            else:
                logprobs, entropy = super().forward_pass(model, tokens, entropy_gradient)
        self.values = self.values_of(tokens, states)
        return logprobs, entropy

    def loss_of(
        self, logprobs: Tensor, entropy: Tensor, microbatch: TokenBatch, alpha: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy's loss plus that of the values, and numbers to log, [B, C] each. While the critic is pretrained, the
        loss is that of the values alone."""
        loss, logged = super().loss_of(logprobs, entropy, microbatch, alpha)
        errors = value_loss(self.values, microbatch.values, microbatch.targets, self.learning.clip)
        learned = self.token_share * (errors * microbatch.mask).sum()
        return learned if self.pretraining else loss + learned, logged | {"value": errors.detach()}


def value_metrics(tokens: TokenBatch, returns: Tensor) -> dict[str, float]:
    """Return the metrics of the values before the update, on all ranks. returns: [B, C], NaN where they are unknown."""
    means, mask = Means(), tokens.mask & ~returns.isnan()
    columns = {"value/mean": tokens.values, "return": returns, "error": returns - tokens.values}
    for name, numbers in columns.items():
        means.add_tokens(name, numbers.double(), mask)
        means.add_tokens(f"{name}^2", numbers.double().square(), mask)
    measured = means.result()
    metrics = {name: measured[name] for name in ("value/mean",) if name in measured}
    if measured.get("return_std", 0.0) > 1e-6:
        metrics["value/explained_variance"] = 1 - (measured["error_std"] / measured["return_std"]) ** 2
    return metrics
