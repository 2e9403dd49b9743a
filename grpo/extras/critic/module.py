"""A critic in the update, PPO (arXiv 1707.06347). Before an update the critic values every token, and the
advantage function compares the rewards with these values; in an update the critic learns what they should have been.

The critic is a value head on the policy's last hidden states, or a model of its own with a value head. Its loss is a mean over
the tokens of an update, on all ranks, and is added to the policy's. Its parameters are a group of the optimizer: their learning
rate is their own, and their gradient is clipped by itself.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.critic.gae import value_loss, value_targets
from grpo.extras.critic.model import Critic, states_disagreement
from grpo.models.adapted import without_adapter
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import Layout
from grpo.models.packed_attention import Kernel
from grpo.models.packing import trusted
from grpo.models.pretrained import Pretrained
from grpo.models.states import Reader, logprobs_and_states, states_before
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.distributed import one_pass
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, Positive, Share, Whole, enforced
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.parts import UpdatePart

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
        if hasattr(without_adapter(policy).get_decoder(), "eyes"):
            raise UserError("critic=model reads text only, and model.vision lets the policy see: take critic=head")
        pretrained = replace(self.model, called="critic.model")
        config, ours = pretrained.config().get_text_config(), policy.config.get_text_config()
        if config.vocab_size < ours.vocab_size:
            line = f"has {config.vocab_size} tokens, the policy {ours.vocab_size}"
            raise UserError(f"critic.model.path={self.model.path} {line}: take a model with the policy's tokenizer")
        imagined = next(policy.parameters()).is_meta  # for the memory forecast
        model = pretrained.outline() if imagined else pretrained.model(getattr(policy, "is_mapped", False))
        head = model.get_output_embeddings().weight
        return Critic(head.shape[1], head.dtype, model.get_decoder().requires_grad_(True))


class Values(UpdatePart):
    """The critic as a part of the update: it values the tokens before the advantages, and learns from the errors of its values.
    Mutable: `alone` while it is pretrained, and metrics of the rollout."""

    def __init__(self, critic: ValueLearning) -> None:
        self.learning, self.metrics, self.entropy = critic, {}, {}

    def attach(self, module: GRPOModule) -> None:
        self.module, self.critic = module, self.learning.critic(module.policy)
        module.critic = self.critic  # so that its parameters are saved and learn
        of_critic = {f"{NAMES}*": {"lr": self.learning.lr, "part": "value"}}
        module.optim = replace(module.optim, groups={**of_critic, **(module.optim.groups or {})})

    @cached_property
    def layout(self) -> tuple[Layout, Kernel | None] | None:
        """The layout that gives correct results for the critic's own model, and its kernel; None if it has no model."""
        model = self.critic.model
        return model and trusted(model, self.module.optim.layout, states_disagreement)

    @torch.no_grad()
    def assign(self, tokens: TokenBatch, batch: RolloutBatch) -> TokenBatch:
        """Add the values, [B, C], and their targets. A pass of the policy also gives the old log-probabilities, if these are
        needed."""
        self.alone = batch.rollout < self.learning.pretrain
        self.entropy = self.module.entropy.state_dict()
        scores, rows = batch.scores.to(tokens.ids.device), torch.arange(len(tokens))
        logprobs, entropy, values = (torch.zeros_like(tokens.rollout_logprobs) for _ in range(3))
        settings, algorithm = (
            (self.module.temperature, False, *self.module.layout, [hidden_states]),
            self.module.algorithm,
        )
        for place, microbatch in self.module.microbatches(tokens.with_scored(), rows):
            width, states, passed = microbatch.completion_width, None, microbatch.passed()
            if self.critic.model is None:
                *of_policy, states = one_pass(self.module.policy, logprobs_and_states, passed, *settings)
                logprobs[place, :width], entropy[place, :width] = of_policy
            values[place, :width] = self.values_of(passed, states) * microbatch.mask
        if self.critic.model is None and algorithm.needs_old and not algorithm.takes("prob_squares"):
            tokens = replace(tokens, old_logprobs=logprobs, old_entropy=entropy)
        places = tokens.mask, tokens.sample, tokens.turn
        of_turns = scores.rewards_of_turns(scores.rewards)
        targets = partial(value_targets, scores.rewards, of_turns, values, *places, self.learning.gamma)
        lam = 1.0 if self.alone else self.learning.lam
        returns = targets(1.0)
        learned = returns if lam == 1 else targets(lam)
        tokens = replace(tokens, values=values, targets=learned.nan_to_num(0.0))
        self.metrics = value_metrics(tokens, returns)
        return tokens

    def values_of(self, tokens: TokenBatch, states: Tensor | None) -> Tensor:
        """Return the values of a microbatch, [B, C], 0 outside of the mask. states: the policy's, [n, width]; None if the critic
        has a model."""
        if self.critic.model is not None:
            with recomputing(self.critic.model, bool(self.module.optim.gradient_checkpointing)):
                states = one_pass(self.critic.model, states_before, tokens, *self.layout)
        return torch.zeros_like(tokens.rollout_logprobs).masked_scatter(tokens.mask, self.critic.head(states))

    def weigh(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Give each token its share in the value loss, a mean over the tokens of an update on all ranks."""
        if minibatch.values is None:  # rows that were not valued
            return minibatch
        share = distributed.world_size() / distributed.all_sum(minibatch.mask.sum()).clamp(min=1)
        return replace(minibatch, valuing=share * minibatch.mask)

    def reader(self, tokens: TokenBatch) -> Reader | None:
        return hidden_states if self.critic.model is None and tokens.valuing is not None else None

    def term(self, microbatch: TokenBatch, logprobs: Tensor, means: Means) -> TokenBatch:
        """Add the errors of the values, with gradient. A model of the critic's own makes its pass here."""
        if microbatch.valuing is None:
            return microbatch
        states = self.read
        if states is not None:
            states = torch.lerp(states.detach(), states, self.learning.coef)  # scales the gradient alone
        values = self.values_of(microbatch.passed(), states)
        errors = value_loss(values, microbatch.values, microbatch.targets, self.learning.clip)
        return replace(microbatch, value_errors=errors)

    def learned(self, batch: RolloutBatch) -> dict[str, float]:
        """Return the metrics of the values. A rollout of the critic alone leaves the controller of the entropy as it was."""
        if self.alone:
            self.module.entropy.load_state_dict(self.entropy)
        return self.metrics

    # -- the forecast of memory

    def models(self) -> list[nn.Module]:
        return [] if self.critic.model is None else [self.critic.model]

    def imagined(self, batch: TokenBatch, layout: Layout) -> Reader:
        if self.critic.model is None:
            return hidden_states
        with recomputing(self.critic.model, bool(self.module.optim.gradient_checkpointing)):
            states = states_before(self.critic.model, batch, layout)
        return lambda *given: states


def hidden_states(model: nn.Module, states: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the states themselves: the value head reads them after the policy's pass."""
    return states


def ActorCritic(*given: Any, critic: ValueLearning, **named: Any) -> GRPOModule:
    """Return the update with a critic, by the name that configurations of earlier runs have."""
    return GRPOModule(*given, **named, parts={"critic": Values(critic)})


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
