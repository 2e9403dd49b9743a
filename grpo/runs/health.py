"""When a metric has left the range in which runs are known to be well."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """What is well: low <= metric <= high. words: what it means if not, and what to do. after: rollouts on end of it. stale: high
    for samples of older weights, where that differs."""

    metric: str
    low: float
    high: float
    words: str
    after: int = 1
    stale: float | None = None


CLIPPED = (
    "many tokens are beyond the bound and teach nothing (usual with algo.level=sequence): lower optim.optimizer.lr, or widen "
    "the bounds of algo.surrogate"
)


RANGES = (
    Range("rollout/logprob_gap", 0, 0.03, "engine and trainer disagree about the same tokens: the engine may hold old weights, "
          "or compute at a lower precision (healthy in bfloat16: 0.010 to 0.018); algo/correction=tis lessens the harm",
          stale=0.3),  # what one rollout teaches is in it, too
    Range("rollout/staleness", 0, 1, "the engine samples with weights that are several rollouts old, and rollout.ahead=1 means "
          "one: it does not take the new ones"),
    Range("rollout/truncated", 0, 0.5, "most answers are cut short: raise max_tokens, or see algo.mask_truncated and "
          "algo.overlong_share"),
    Range("rollout/timeout", 0, 0.02, "the grader often runs out of time, and those samples teach nothing: look for outcome "
          "timeout in rollouts/, or raise score_timeout"),
    Range("rollout/error", 0, 0, "the grader failed on some samples, as on a right answer that it cannot read: look for "
          "reward null in rollouts/"),
    Range("rollout/no_answer", 0, 0.5, "most answers are not where the reward looks for them (a box, a last ####): ask for it in "
          "the prompt, reward the form, or raise max_tokens", after=3),
    Range("rollout/env_error", 0, 0.02, "environments raise, and those samples teach nothing: look for env_error in rollouts/"),
    Range("rollout/env_timeout", 0, 0.02, "environments take longer than step_timeout, and those samples teach nothing: raise "
          "it, or look for env_error in rollouts/"),
    Range("rollout/out_of_turns", 0, 0.5, "most episodes do not come to an end: raise max_turns, or reward an answer", after=3),
    Range("rollout/malformed_calls", 0, 0.5, "calls of tools cannot be read: see renderer.tool_calls, or rollouts/ for what the "
          "policy writes", after=3),
    Range("rollout/effective_groups", 1e-9, 1, "no group's rewards differ, and there is nothing to compare: the task may be too "
          "hard or too easy for the policy, or the reward broken; look at rollouts/", after=3),
    Range("loss/ratio", 0.8, 1.2, "the policy moves far within one rollout: lower optim.optimizer.lr, algo.num_epochs or "
          "algo.num_minibatches"),
    Range("loss/approx_kl", -math.inf, 0.5, "the policy has left the one that sampled: lower optim.optimizer.lr, "
          "algo.num_epochs or algo.num_minibatches"),
    Range("loss/kl", -math.inf, 0.5, "the policy is far from what algo.kl holds it to (0.01 to 0.1 is usual): lower "
          "optim.optimizer.lr or raise algo.kl.coef"),
    Range("loss/clip_fraction_high", 0, 0.3, CLIPPED),
    Range("loss/clip_fraction_low", 0, 0.3, CLIPPED),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """After `rollout` rollouts a metric was out of its range; words: the bound, what it means, and what to do."""

    rollout: int
    metric: str
    value: float
    words: str


class Watch:
    """Looks at the metrics of a run as they come, and finds each that leaves its range once."""

    def __init__(self) -> None:
        self.silent: set[str] = set()  # metrics not to speak of, or not again
        self.unwell: Counter[str] = Counter()  # rollouts on end

    def findings(self, rollout: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        """What is new of these metrics. Rollouts come in order."""
        older = metrics.get("rollout/staleness", 0) > 0
        for well in RANGES:
            value = metrics.get(well.metric)
            high = well.high if well.stale is None or not older else well.stale
            if value is None or well.low <= value <= high:
                self.unwell[well.metric] = 0
                continue
            self.unwell[well.metric] += 1
            if self.unwell[well.metric] < well.after or well.metric in self.silent:
                continue
            self.silent.add(well.metric)
            bound = f"above {high:g}" if value > high else f"below {well.low:g}"
            yield Finding(rollout, well.metric, value, f"{bound}: {well.words}")


def warnings_of(metrics: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Every finding of a run with these metrics, by rollouts learned from: each metric once."""
    watch = Watch()
    return [finding for rollout, row in metrics.items() for finding in watch.findings(rollout, row)]
