"""An algorithm: a point on each of eight axes, and how often a rollout is used. conf/algo holds the named algorithms.

    advantage x level of the ratio x surrogate x reduction x KL x choice of tokens x correction x teacher

Every axis is a pure function of tensors in a file of its own. This file joins them: `credit` turns rewards into advantages,
`loss` is equation 1. refusals.py refuses meaningless combinations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from grpo.objectives.advantage import reward_to_go, whiten
from grpo.objectives.arguments import OFFERED, call, function_of, parameters
from grpo.objectives.batch import Scores, TokenBatch
from grpo.objectives.choice import chosen_tokens, with_top_entropy
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL, k3
from grpo.objectives.loss import Level, Reduce, off_policy_keep, policy_log_ratio, token_weights
from grpo.objectives.refusals import check_axes
from grpo.objectives.shaping import less_kl, less_overlong
from grpo.objectives.staleness import ages, policy_between
from grpo.objectives.terms import WithTerms
from grpo.objectives.trial import silent_without_advantage
from grpo.system import distributed
from grpo.system.progress import BEGIN, Progress
from grpo.system.ranges import Count, NonNegative, Positive, Share, SomeShare, enforced

BySource = Mapping[str, Mapping[Literal["policy", "imitation", "teacher"], NonNegative]]  # factors of terms, by source


@enforced("Algorithm")
@dataclass(frozen=True)
class Algorithm(WithTerms):
    """advantage, surrogate, choice, correction: functions; arguments.py lists what they are given.

    level, reduce: see `policy_log_ratio` and `token_weights`; max_tokens is L_max, the run's limit of new tokens.
    old_policy: the denominator of the ratio. `trainer`: the policy before the update, with the trainer's log-probabilities;
    `rollout`: the policy that sampled, with the engine's, without an extra pass or correction (bypass); `between`: staleness.py.
    whiten: scale advantages to mean 0 and standard deviation 1 over all tokens of a rollout.
    top_entropy: below 1, the choice is this share of the tokens, by entropy. off_policy_delta: see `off_policy_keep`.
    overlong_share: the last share of max_tokens, over which `overlong_penalty` falls; 0 is off. mask_truncated: truncated answers
    stay in their group's baseline, but nothing is learned from them. policy_coef: of the policy's term of equation 1; imitation,
    teacher: of other terms, objects (`OtherTerm`) in a run that has them (conf/teacher), else keys that nobody reads; by_source:
    factors of these terms by the column `source` of a row. num_epochs: passes over a rollout, num_minibatches updates each.
    """

    advantage: Callable[..., Tensor]
    surrogate: Callable[..., Any]
    max_tokens: Count
    level: Level = "token"
    reduce: Reduce = "sequence"
    kl: KL = field(default_factory=KL)
    choice: Callable[..., Tensor] | None = None
    correction: Callable[..., Tensor] | None = None
    old_policy: Literal["trainer", "rollout", "between"] = "trainer"
    whiten: bool = False
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    top_entropy: SomeShare = 1.0
    off_policy_delta: Positive | None = None
    overlong_share: Share = 0.0
    mask_truncated: bool = False
    policy_coef: NonNegative = 1.0
    imitation: Any = None
    teacher: Any = None
    by_source: BySource | None = None
    num_epochs: Count = 1
    num_minibatches: Count = 1

    def __post_init__(self) -> None:
        level, reduce = function_of("level", self.level, Level), function_of("reduce", self.reduce, Reduce)
        for name in ("imitation", "teacher"):
            vars(self)[name] = term if hasattr(term := getattr(self, name), "active") else None
        vars(self).update(level=level, reduce=reduce, choice=with_top_entropy(self.choice, self.top_entropy))
        check_axes(self)

    @property
    def updates_per_rollout(self) -> int:
        """The number of optimizer steps for each rollout."""
        return self.num_epochs * self.num_minibatches

    @property
    def needs_old(self) -> bool:
        """Whether a pass before the first update is needed; else the first update's own log-probabilities are the old ones."""
        several = self.num_minibatches > 1 or self.freezes_first
        return self.choice is not None or self.takes("prob_squares") or (several and self.old_policy == "trainer")

    @property
    def freezes_first(self) -> bool:
        """Whether advantages need log-probabilities: these come first then, and no row without an advantage can be left out."""
        return self.kl.in_reward or self.takes("old_logprobs") or self.takes("prob_squares")

    def takes(self, name: str) -> bool:
        """Return whether the advantage names a value."""
        return name in parameters(self.advantage)

    @cached_property
    def skips_zero_advantages(self) -> bool:
        """Whether a row with advantage 0 has no gradient."""
        return not self.kl.in_loss and not self.entropy.active and silent_without_advantage(self.policy_term)

    # -- rewards to advantages

    def shaped(self, scores: Scores) -> Scores:
        """Apply the first step of shaping.py, which needs no tokens."""
        return less_overlong(scores, self.max_tokens, self.overlong_share)

    def credit(self, scores: Scores, tokens: TokenBatch, progress: Progress = BEGIN) -> TokenBatch:
        """Add the advantages, and remove samples without a reward and truncated answers (mask_truncated) from the mask. scores:
        from `shaped`. With the KL in the reward, tokens must have reference_logprobs and old_logprobs."""
        rewards, token_rewards = less_kl(scores.rewards, self.kl, self.old_logprobs(tokens), tokens)
        offered = {**vars(tokens), **vars(scores), "rewards": rewards, "progress": progress}
        offered |= {"steps": scores.rewards_of_turns(rewards), "old_logprobs": self.old_logprobs(tokens)}
        advantages = call("advantage", self.advantage, {name: offered.get(name) for name in OFFERED["advantage"]})
        if not self.takes("mask"):
            advantages = tokens.on_tokens(advantages)  # [B, C]
        mask = tokens.mask & ~(advantages.isnan() | rewards.isnan().flatten()[tokens.sample, None])
        if tokens.given is not None:
            advantages = torch.where(tokens.given.isnan(), advantages, tokens.given)
        advantages = torch.where(mask, advantages, 0.0)
        if token_rewards is not None:
            advantages = advantages + reward_to_go(token_rewards, mask, tokens.sample)
        if self.whiten:  # truncated answers count here, as in the mean of their group
            advantages = whiten(advantages, mask, concatenated=distributed.all_gather)
        if self.mask_truncated:
            mask = mask & ~scores.truncated.flatten()[tokens.sample, None]
        # 0 and not left out: such samples stay in their group's baseline, and no row has a NaN
        advantages, group = torch.where(mask, advantages, 0.0), tokens.sample // scores.rewards.shape[1]
        return replace(tokens, mask=mask, advantages=advantages, group=group)

    def choose(self, tokens: TokenBatch, rng: torch.Generator) -> TokenBatch:
        """Add `counted`, the tokens that the surrogate counts, if not all of them do; needs old_logprobs and old_entropy."""
        return tokens if self.choice is None else replace(tokens, counted=chosen_tokens(self.choice, tokens, rng))

    # -- advantages to a loss

    def old_logprobs(self, batch: TokenBatch) -> Tensor | None:
        """Return the log-probabilities of the old policy in the ratio, [B, C]."""
        return batch.rollout_logprobs if self.old_policy == "rollout" else batch.old_logprobs

    def weights(self, mask: Tensor, *rows: Tensor | float | None) -> Tensor:
        """Return w [B, C], each token's share in an update's loss. rows: sample, count and group, as in `token_weights`."""
        return token_weights(mask, self.reduce, self.max_tokens, *rows, total=distributed.all_sum) * self.policy_coef

    def policy_term(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return l(rho, A), the numbers that the surrogate logs, and the ratio rho (None for level: none). [B, C] each."""
        offered = {name: getattr(batch, name) for name in ("rollout_logprobs", "advantages", "mask", "sample", "group")}
        offered["counted"], rho = batch.mask if batch.counted is None else batch.counted, None
        offered["logprobs"] = logprobs
        if self.level != "none":
            old = self.old_logprobs(batch)
            log_rho = policy_log_ratio(logprobs, old, batch.mask, self.level)
            rho = log_rho.exp()
            offered |= {"old_logprobs": old, "log_ratio": log_rho, "ratio": rho}
        result = call("surrogate", self.surrogate, offered)
        return (*result, rho) if isinstance(result, tuple) else (result, {}, rho)

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, alpha: float = 0.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Equation 1, over rows i and their tokens t:

            L = sum_it w_it [ c_it k_it f_it l(rho_it, A_it) + beta KL_it - alpha H_it ] + u_it CE_it + v_it D_it + x_it E_it

        w    the token's share in the update, by `reduce` (`token_weights`), times policy_coef
        c    whether the token counts (`choice`); 1 if the surrogate names `counted` and says itself what that means
        k    whether the row is kept: 0 if A < 0 and the policy has moved too far from it (`off_policy_keep`)
        f    the correction of the engine's mismatch, old policy / rollout policy (`correction`)
        l    the surrogate of the ratio rho = policy / old policy, at `level`, and the advantage A
        KL   the estimate of KL(policy || target) if its place is the loss, times rho for loss_with_ratio; beta is kl.coef
        H    the entropy of the policy; alpha is that of `EntropyController`
        CE   -log policy, the cross-entropy with a text (`imitation`); D: the divergence to a teacher (`teacher`); E: the
             squared error of a critic's value
        u, v, x: the token's share in these terms, each with a denominator of its own

        A factor that is off is 1, a term that is off 0. logprobs, entropy: [B, C], with gradient (the entropy only if it is
        active). batch: with advantages, weights, old_logprobs, and whatever the axes need. Returns the sum over a microbatch, to
        be summed over the update, and numbers to log, [B, C] each.
        """
        c = k = f = 1.0
        u = v = x = CE = D = E = 0.0
        w, beta, KL, H = batch.weights, self.kl.coef, 0.0, entropy if alpha else 0.0
        if self.old_policy == "between":
            batch = replace(batch, old_logprobs=policy_between(logprobs, batch))
        l, logged, rho = self.policy_term(logprobs, batch)  # noqa: E741 - the equation's letter
        logged = {**logged, "policy": l, "approx_kl": k3(self.old_logprobs(batch), logprobs), "entropy": entropy}
        if batch.counted is not None and "counted" not in parameters(self.surrogate):
            c = batch.counted
        if self.off_policy_delta is not None:
            k = off_policy_keep(logprobs, batch.rollout_logprobs, batch.advantages, batch.mask, self.off_policy_delta)
            logged["off_policy_dropped"] = ~k
        if self.correction is not None:
            offered = {name: getattr(batch, name) for name in ("mask", "old_logprobs", "rollout_logprobs")}
            offered |= {"log_w": (batch.old_logprobs - batch.rollout_logprobs) * batch.mask, "staleness": ages(batch)}
            f = logged["correction"] = call("correction", self.correction, offered)
        if self.kl.in_loss:
            target = batch.reference_logprobs if self.kl.target == "reference" else batch.rollout_logprobs
            KL = logged["kl"] = self.kl.estimate(logprobs, target)
            if self.kl.place == "loss_with_ratio":
                KL = KL * rho
        if rho is not None:
            logged["ratio"] = rho
        if batch.imitation is not None:
            u, CE = batch.imitation, -logprobs
        if batch.teaching is not None:
            v, D = batch.teaching, batch.divergence
        if batch.valuing is not None:
            x, E = batch.valuing, batch.value_errors
            logged["value"] = E
        if not self.compares:  # texts, and nobody asks how probable their author found them
            logged |= {"approx_kl": torch.zeros_like(entropy)}
            logged.pop("ratio", None)
        L = (w * (c * k * f * l + beta * KL - alpha * H) + u * CE + v * D + x * E).sum()  # not a mean: w are shares
        return L, {name: values.detach().float() for name, values in logged.items()}
