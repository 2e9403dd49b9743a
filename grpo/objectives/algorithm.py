"""An algorithm: a point on six axes, and how often a rollout is used. conf/algo holds the named ones.

    advantage x level of the ratio x surrogate x reduction x KL x correction of the engine's mismatch

Every axis is a pure function of tensors in its own file; this one puts them together and refuses what has no meaning.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from grpo.objectives.advantage import overlong_penalty, reward_to_go, whiten
from grpo.objectives.batch import Scores, TokenBatch
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL, k3
from grpo.objectives.loss import Level, Reduce, clip, off_policy_keep, policy_log_ratio, token_weights
from grpo.system import distributed
from grpo.system.errors import UserError

log = logging.getLogger(__name__)

FOR_ADVANTAGE = ("rewards", "lengths", "parts")
WITHOUT_RATIO = ("logprobs", "rollout_logprobs", "advantages", "mask")
FOR_SURROGATE = ("ratio", "log_ratio", "old_logprobs", *WITHOUT_RATIO)


def call(function: Callable, given: Mapping[str, Any]) -> Any:
    """The function on those of the `given` values that it has parameters for."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in given.items() if name in parameters})


def random_batch() -> tuple[Tensor, TokenBatch]:
    """Log-probabilities [2, 3] and what goes with them, to try functions on."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, rollout = -torch.rand(3, 2, 3, generator=generator)
    batch = TokenBatch(
        ids=torch.zeros(2, 4, dtype=torch.int64),
        attention_mask=torch.ones(2, 4, dtype=torch.int64),
        mask=torch.ones(2, 3, dtype=torch.bool),
        rollout_logprobs=rollout,
        sample=torch.arange(2),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        old_logprobs=old,
    )
    return logprobs.requires_grad_(), batch


def name_of(function: Callable) -> str:
    return getattr(function, "func", function).__name__


@dataclass(frozen=True)
class Algorithm:
    """advantage, surrogate, correction: functions, see grpo/advantage.py, loss.py and correction.py for what they are given.

    level and reduce: see `policy_log_ratio` and `token_weights`; max_tokens is L_max, the run's limit of new tokens.
    old_policy: what the ratio compares with. `trainer`: the policy before the update by the trainer's own log-probabilities;
    `rollout`: the policy that sampled by the engine's, which needs no pass of its own, and no correction (bypass).
    whiten: advantages to mean 0 and standard deviation 1 over all tokens of a rollout.
    top_entropy: the share of tokens, by entropy, that the surrogate counts. off_policy_delta: see `off_policy_keep`.
    overlong_share: of max_tokens, over which `overlong_penalty` falls; 0 is off. mask_truncated: answers cut short stay in
    their group's baseline, and nothing is learned from them.
    sampling_rounds: above 1, groups of equal rewards are replaced by others until none is left or the rounds are (DAPO).
    Each of num_epochs passes over a rollout is num_minibatches updates.
    """

    advantage: Callable[..., Tensor]
    surrogate: Callable[..., Any]
    max_tokens: int
    level: Level = "token"
    reduce: Reduce = "sequence"
    kl: KL = field(default_factory=KL)
    correction: Callable[[Tensor, Tensor], Tensor] | None = None
    old_policy: Literal["trainer", "rollout"] = "trainer"
    whiten: bool = False
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    top_entropy: float = 1.0
    off_policy_delta: float | None = None
    overlong_share: float = 0.0
    mask_truncated: bool = False
    sampling_rounds: int = 1
    num_epochs: int = 1
    num_minibatches: int = 1

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_minibatches", "sampling_rounds", "max_tokens"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise UserError(f"algo.{name}={value} must be a whole number, at least 1")
        for name in ("whiten", "mask_truncated"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"algo.{name}={value} must be true or false")
        for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(
                    f"algo.{name}={getattr(self, name)} must be a grpo {kind.__name__}: coef 0 switches it off"
                )
        if (delta := self.off_policy_delta) is not None and (not isinstance(delta, int | float) or delta <= 0):
            raise UserError(f"algo.off_policy_delta={delta} must be a number above 0, or null")
        choices = {"level": get_args(Level), "reduce": get_args(Reduce), "old_policy": ("trainer", "rollout")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"algo.{name}={getattr(self, name)} is not one of {', '.join(allowed)}")
        if not 0 < self.top_entropy <= 1:
            raise UserError(
                f"algo.top_entropy={self.top_entropy} is a share of the tokens: above 0, and 1 for all of them"
            )
        if not 0 <= self.overlong_share <= 1:
            raise UserError(
                f"algo.overlong_share={self.overlong_share} is a share of max_tokens: 0 (off) to 1, DAPO's is 0.2"
            )
        self.check_names()
        self.check_axes()

    def check_names(self) -> None:
        """Refuse a function that wants what there is not."""
        offered = {"advantage": FOR_ADVANTAGE, "surrogate": FOR_SURROGATE, "correction": ("log_w", "mask")}
        if self.level == "none":
            offered["surrogate"] = WITHOUT_RATIO
        for axis, names in offered.items():
            if (function := getattr(self, axis)) is None:
                continue
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD or name in names:
                    continue
                if axis == "surrogate" and name in FOR_SURROGATE:
                    raise UserError(
                        f"algo.level=none, but algo.surrogate ({name_of(function)}) needs the {name}: take "
                        "algo/surrogate=reinforce, or algo.level=token"
                    )
                raise UserError(f"algo.{axis} ({name_of(function)}) wants {name!r}, there is only: {', '.join(names)}")

    def check_axes(self) -> None:
        """Refuse combinations of axes without meaning."""
        if self.level == "none" and self.kl.in_loss and self.kl.place == "loss_with_ratio":
            raise UserError("algo.kl.place=loss_with_ratio, but algo.level=none has no ratio: set algo.kl.place=loss")
        if self.old_policy == "rollout" and self.correction is not None:
            raise UserError(
                "algo.old_policy=rollout puts the engine's mismatch into the ratio, and algo.correction would count it "
                "twice: set algo/correction=none or algo.old_policy=trainer"
            )
        takes = inspect.signature(self.surrogate).parameters.keys()
        if (
            self.level not in ("token", "none")
            and not takes & {"ratio", "log_ratio"}
            and self.kl.place != "loss_with_ratio"
        ):
            raise UserError(
                f"algo.level={self.level} has no effect: algo.surrogate ({name_of(self.surrogate)}) does not look at the ratio; "
                "set algo.level=none"
            )
        changed = {"algo.overlong_share": self.overlong_share, "algo.kl.place=reward": self.kl.of_reward}
        if "rewards" not in inspect.signature(self.advantage).parameters and any(changed.values()):
            what = next(name for name, is_on in changed.items() if is_on)
            raise UserError(
                f"{what} changes the reward, and algo.advantage ({name_of(self.advantage)}) does not look at it"
            )
        if getattr(self.surrogate, "func", self.surrogate) is not clip:
            return
        settings = inspect.signature(self.surrogate).parameters
        low, high, dual = (settings[name].default for name in ("low", "high", "dual"))
        said = f"algo.surrogate.low={low} high={high}"
        if (low is not None and not 0 < low <= 1) or (high is not None and high <= 0):
            raise UserError(
                f"{said}: they are distances from 1, 0 < low <= 1 and high > 0, as in 0.2 and 0.28; null is no bound"
            )
        if dual is not None and dual <= 1 + (high or 0):
            raise UserError(f"algo.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off")
        widest = max(low or 0, high or 0)
        if self.level in ("sequence", "sequence_token") and widest >= 0.05:
            raise UserError(
                f"{said} with algo.level={self.level}: a mean over the tokens moves far less than a token's ratio, such bounds "
                "never act; GSPO's are low=3e-4 high=4e-4, or set algo.level=token"
            )
        if self.level in ("token", "sequence_sum") and 0 < widest < 0.005:
            raise UserError(
                f"{said} with algo.level={self.level}: nearly every token would be clipped; such bounds are for "
                "algo.level=sequence, token ratios take 0.2"
            )

    def check(self, prompts: int, group_size: int, ahead: int = 0) -> None:
        """Refuse what does not fit the rollout: its size, a group too small, samples of older weights taken for the policy's own.
        Tries the functions on random numbers, and logs what works and is rarely meant."""
        for line in self.advice():
            log.warning(line)
        if ahead and not self.weighs_old_samples:
            bypass = "algo.old_policy=rollout (the ratio compares with the policy that sampled) or "
            raise UserError(
                f"rollout.ahead={ahead}: the samples are older than the policy, and this objective takes them for its own: set "
                f"{bypass if self.looks_at_ratio else ''}algo/correction=tis (they count by how likely they have become)"
            )
        rows = prompts * group_size
        if rows % self.num_minibatches:
            valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise UserError(
                f"algo.num_minibatches={self.num_minibatches} does not divide the {rows} rows of a rollout "
                f"({prompts} prompts x {group_size} samples); valid values: {valid}"
            )
        if group_size == 1 and self.sampling_rounds > 1:
            raise UserError(
                "rollout.group_size=1: a group of one never differs in reward, dynamic sampling would discard them all; "
                "set algo.sampling_rounds=1 or a larger group"
            )
        generator = torch.Generator().manual_seed(0)
        some = partial(torch.rand, (prompts, group_size), generator=generator)
        least = -1.0 if self.overlong_share or self.kl.of_reward else 0.0  # those make rewards negative
        given = {"rewards": some() + least, "lengths": 1 + some(), "parts": defaultdict(some)}
        advantages = self.tried("advantage", lambda: call(self.advantage, given), (prompts, group_size))
        if group_size == 1 and not advantages.any():
            raise UserError(
                "rollout.group_size=1: advantages compare the samples of one prompt, so at least 2 are needed "
                "(algo=reinforce_pp takes 1)"
            )
        logprobs, batch = random_batch()
        term, said, _ = self.tried("surrogate", lambda: self.policy_term(logprobs, batch), (2, 3))
        if self.correction is not None:
            self.tried("correction", lambda: self.correction(torch.zeros(2, 3), batch.mask), (2, 3))
        if not term.requires_grad:
            raise UserError(
                f"algo.surrogate ({name_of(self.surrogate)}) has no gradient: it must depend on logprobs or ratio"
            )
        for name, values in said.items():
            if not isinstance(values, Tensor) or values.shape != (2, 3):
                raise UserError(
                    f"algo.surrogate ({name_of(self.surrogate)}) says {name!r}, which must be [B, C] like the loss"
                )

    def tried(self, axis: str, attempt: Callable[[], Any], shape: tuple[int, int]) -> Any:
        function = name_of(getattr(self, axis))
        try:
            result = attempt()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"algo.{axis} ({function}) fails on random numbers: {type(error).__name__}: {error}"
            ) from error
        tensor = result[0] if isinstance(result, tuple) else result
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"algo.{axis} ({function}) must return a tensor of shape {list(shape)}, and gave {found}")
        if not tensor.isfinite().all():
            raise UserError(
                f"algo.{axis} ({function}) gives numbers that are not finite on random ones: look at its settings"
            )
        return result

    def advice(self) -> list[str]:
        said = []
        if self.kl.coef and self.kl.estimator == "k1" and self.kl.place == "loss":
            said.append(
                "algo.kl: the expected gradient of k1 in the loss is 0 (arXiv 2510.01555), it only adds noise; k2 there, k1 with "
                "place=reward, and k1 or k3 with place=loss_with_ratio pull towards the reference"
            )
        if self.kl.in_reward and self.kl.estimator != "k1":
            said.append(f"algo.kl: {self.kl.estimator} in the reward does not have the gradient of the KL, k1 does")
        if not self.kl.coef and (self.kl.place, self.kl.estimator, self.kl.target) != ("loss", "k3", "reference"):
            said.append("algo.kl.coef=0: there is no KL, and the other keys of algo.kl do nothing")
        if self.level == "none" and self.updates_per_rollout > 1:
            said.append(
                f"algo.level=none with {self.updates_per_rollout} updates a rollout: all but the first learn from an older "
                "policy's samples as if they were their own; algo/surrogate=clip algo.level=token weighs them"
            )
        return said

    # -- what it needs

    @property
    def updates_per_rollout(self) -> int:
        return self.num_epochs * self.num_minibatches

    @property
    def looks_at_ratio(self) -> bool:
        return bool(inspect.signature(self.surrogate).parameters.keys() & {"ratio", "log_ratio", "old_logprobs"})

    @property
    def weighs_old_samples(self) -> bool:
        """Whether the policy's term of the loss compares with the policy that sampled, where that is older than the one that
        learns."""
        if self.correction is not None or "rollout_logprobs" in inspect.signature(self.surrogate).parameters:
            return True
        return self.old_policy == "rollout" and self.looks_at_ratio

    @property
    def needs_old(self) -> bool:
        """Whether a pass before the first update is needed; else the log-probabilities that it meets are the old ones."""
        if self.top_entropy < 1:
            return True
        return self.old_policy == "trainer" and (self.num_minibatches > 1 or self.kl.in_reward)

    @cached_property
    def skips_zero_advantages(self) -> bool:
        """Whether a row without advantage has no gradient. A surrogate of a user's may have terms of its own."""
        if self.kl.in_loss or self.entropy.active:
            return False
        logprobs, batch = random_batch()
        with torch.enable_grad():
            term, _, _ = self.policy_term(logprobs, replace(batch, advantages=torch.zeros(2, 3)))
            return not torch.autograd.grad(term.sum(), logprobs, materialize_grads=True)[0].any()

    # -- what it does

    def shaped(self, scores: Scores) -> Scores:
        """The scores with the penalty for overlong answers in the rewards."""
        if not self.overlong_share:
            return scores
        if "overlong" in scores.parts:
            raise UserError(
                "a part of the reward is called 'overlong', as the penalty of algo.overlong_share is: rename that part, or set "
                "algo.overlong_share=0"
            )
        penalty = overlong_penalty(scores.last_lengths, self.max_tokens, self.overlong_share)
        return replace(scores, rewards=scores.rewards + penalty, parts={**scores.parts, "overlong": penalty})

    def credit(self, scores: Scores, tokens: TokenBatch) -> TokenBatch:
        """Adds the advantages, and takes out of the mask what nothing is learned from: samples without a reward, and cut short.

        With the KL in the reward the tokens must bring reference_logprobs and, for old_policy: trainer, old_logprobs.
        """
        rewards, mask = scores.rewards, tokens.mask
        if self.kl.in_reward:
            kl = self.kl.coef * self.kl.estimate(self.old_logprobs(tokens), tokens.reference_logprobs) * mask
            if self.kl.of_reward:
                of_samples = torch.zeros(rewards.numel(), device=kl.device).index_add(0, tokens.sample, kl.sum(1))
                rewards = rewards - distributed.all_sum(of_samples).view_as(rewards)
        given = {"rewards": rewards, "lengths": scores.lengths, "parts": scores.parts}
        of_rows = call(self.advantage, given).flatten()[tokens.sample, None]  # [B, 1]
        mask = mask & ~of_rows.isnan()
        advantages = torch.where(mask, of_rows, 0.0)  # [B, C]
        if self.kl.in_reward and self.kl.place == "reward_to_go":
            advantages = advantages - reward_to_go(kl, mask, tokens.sample)
        if self.whiten:
            advantages = whiten(advantages, mask, concatenated=distributed.all_gather)
        if self.mask_truncated:
            mask = mask & ~scores.truncated.flatten()[tokens.sample, None]
        return replace(tokens, mask=mask, advantages=torch.where(mask, advantages, 0.0))

    def old_logprobs(self, batch: TokenBatch) -> Tensor | None:
        return batch.rollout_logprobs if self.old_policy == "rollout" else batch.old_logprobs

    def weights(self, mask: Tensor, sample: Tensor | None = None) -> Tensor:
        """[B, C]: a token's share in the loss of one update, of which `mask` [B, C] and `sample` [B] hold this rank's rows."""
        return token_weights(mask, self.reduce, self.max_tokens, sample, distributed.all_sum)

    def policy_term(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """The surrogate [B, C], what it says [B, C] each, and the ratio [B, C], where there is one."""
        given = {name: getattr(batch, name) for name in ("rollout_logprobs", "advantages", "mask")} | {
            "logprobs": logprobs
        }
        ratio = None
        if self.level != "none":
            old = self.old_logprobs(batch)
            log_ratio = policy_log_ratio(logprobs, old, batch.mask, self.level)
            ratio = log_ratio.exp()
            given |= {"old_logprobs": old, "log_ratio": log_ratio, "ratio": ratio}
        result = call(self.surrogate, given)
        term, stats = result if isinstance(result, tuple) else (result, {})
        return term, stats, ratio

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, entropy_coef: float = 0.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch (a scalar, to be summed), and numbers to log, each [B, C].

        logprobs, entropy: [B, C], with gradient (the entropy only where `entropy.active`). The batch brings advantages,
        weights, old_logprobs (the trainer's), and reference_logprobs and counted where they are needed.
        """
        term, said, ratio = self.policy_term(logprobs, batch)
        stats = {**said, "policy": term, "approx_kl": k3(self.old_logprobs(batch), logprobs), "entropy": entropy}
        if batch.counted is not None:
            term = term * batch.counted
        if self.off_policy_delta is not None:
            keep = off_policy_keep(
                logprobs, batch.rollout_logprobs, batch.advantages, batch.mask, self.off_policy_delta
            )
            term, stats["off_policy_dropped"] = term * keep, 1.0 - keep.expand_as(term).float()
        if self.correction is not None:
            factor = self.correction((batch.old_logprobs - batch.rollout_logprobs) * batch.mask, batch.mask)
            term, stats["correction"] = term * factor, factor
        if self.kl.in_loss:
            target = batch.reference_logprobs if self.kl.target == "reference" else batch.rollout_logprobs
            kl = stats["kl"] = self.kl.estimate(logprobs, target)
            term = term + self.kl.coef * (kl * ratio if self.kl.place == "loss_with_ratio" else kl)
        if entropy_coef:
            term = term - entropy_coef * entropy
        if ratio is not None:
            stats["ratio"] = ratio
        return (batch.weights * term).sum(), {name: values.detach().float() for name, values in stats.items()}
