"""The dictionary of metrics: the meaning of each number, its unit, and its range in healthy runs.

Everything that shows, watches or names a metric reads it here. `python -m grpo.system.metrics` prints the table of
docs/algorithms.md.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from typing import Literal

from grpo.system.errors import UserError

Unit = Literal["share", "reward", "count", "tokens", "nats", "number", "tokens/s", "seconds", "bytes", "text"]


@dataclass(frozen=True)
class Metric:
    """name: as it is logged; K stands for a number, NAME for any text. words: its meaning.

    A run is healthy while low <= value <= high. advice: the meaning of a value outside, and what to do; without it there are
    no warnings. after: a warning comes after this many rollouts in a row outside. stale: `high` for samples of older weights,
    if it differs. per: low and high are multiples of this metric. jump: `high` is also this many times the median of the last
    rollouts. falls: it is too low if it is so far below its best mean of several rollouts, while the reward is higher. stop: a
    value whose size is above it ends the run, unless alarms=warn. charted: the report shows it by default. part: a part of the
    reward, so users may use its name. fault: counts failures, and is not shown while it is 0.
    """

    name: str
    unit: Unit
    words: str
    low: float = -math.inf
    high: float = math.inf
    advice: str = ""
    after: int = 1
    stale: float | None = None
    per: str = ""
    jump: float = math.inf
    falls: float = math.inf
    stop: float = math.inf
    charted: bool = False
    part: bool = False
    fault: bool = False


def both(name: str, *values, **more) -> tuple[Metric, Metric]:
    """Return the metric of training rollouts, and the same metric of evaluations without a range."""
    metric = Metric(f"rollout/{name}", *values, **more)
    return metric, replace(metric, name=f"eval/{name}", low=-math.inf, high=math.inf, advice="", charted=False)


CLIPPED = "many tokens are beyond the bounds of algo.surrogate (usual at level=sequence): widen them, or lower optim.optimizer.lr"
SLOWER = "lower optim.optimizer.lr, algo.num_epochs or algo.num_minibatches"

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Reward and accuracy": (
        Metric("eval/accuracy", "share", "Right samples of a held-out problem, mean over problems.", charted=True,
               advice="it is far below its best, whose policy is in checkpoints/best: lower optim.optimizer.lr"),
        Metric("rollout/reward", "reward", "Mean over the samples whose reward is known, with the penalty for overlong "
               "answers, before any KL.", -1e6, 1e6, "no reward is so large: a reward function is broken, see rollouts/",
               stop=1e6, charted=True),
        Metric("rollout/solve_rate", "share", "Right samples among those whose reward is known.", falls=0.15, advice="fewer "
               "answers are right while the reward grows: the policy exploits the reward, read the best samples in rollouts/",
               charted=True),
        Metric("rollout/effective_groups", "share", "Groups whose rewards differ: the others teach nothing.", 1e-9, 1,
               "no group's rewards differ: the task may be too hard or too easy, or the reward broken; look at rollouts/",
               after=3, charted=True),
        Metric("eval/accuracy_lenient", "share", "As accuracy, but with the answer taken from anywhere in the text."),
        Metric("eval/pass@K", "share", "Chance that at least one of K samples is right (arXiv 2107.03374)."),
        Metric("eval/pass^K", "share", "Chance that all of K samples are right (arXiv 2406.12045)."),
        Metric("eval/maj@K", "share", "Chance that the most frequent answer of K is right (arXiv 2203.11171)."),
        Metric("eval/NAME_iqm", "share", "Interquartile mean over seeds, in comparisons only (arXiv 2108.13264)."),
        Metric("rollout/NAME_std", "reward", "Standard deviation over samples, of the reward or of a part."),
        *both("correct", "share", "Right samples, of one source of a mixture.", part=True),
        *both("format", "share", "Answers in the requested form.", part=True),
        *both("level_K", "share", "Right samples among the problems of level K.", part=True),
        *both("hops_K", "share", "Right samples among the questions of K hops.", part=True),
        *both("supports", "share", "Supporting paragraphs that were found.", part=True),
        *both("tricks", "share", "Programs with the marks of a trick against their tests.", 0, 0.2, "many programs use frames, "
              "ctypes or hooks, or define __eq__: the tests are out of their reach, but read some in rollouts/", after=3,
              part=True, fault=True),
        *both("judge_invalid", "share", "Verdicts of judge=... that failed or are no choice: their samples have no reward.", 0,
              0.05, "the judge fails, and those samples teach nothing: see judge.url, judge.per_minute and judge.criteria",
              stop=0.5, part=True, fault=True),
        *both("judge_flips", "share", "Comparisons with another winner in the other order.", 0, 0.5,
              "the judge looks at the place of a response: take another model, or clearer criteria", after=3, part=True),
        Metric("rollout/overlong", "reward", "Penalty for overlong answers, with algo.overlong_share.", part=True),
        *both("NAME", "reward", "Any other part of the reward, mean over the samples that have it.", part=True),
        Metric("rollout/rounds", "count", "Rounds of dynamic sampling."),
        Metric("rollout/discarded_groups", "count", "Groups that dynamic sampling replaced."),
        Metric("rollout/advantages_positive", "count", "Samples with a positive advantage."),
        Metric("rollout/advantages_negative", "count", "Samples with a negative advantage."),
        Metric("rollout/advantages_mean", "number", "Mean advantage of the samples; one that is not learned from has 0."),
        Metric("rollout/advantages_std", "number", "Standard deviation of the samples' advantages."),
        Metric("data/prompts", "count", "Prompts that were drawn since the run began."),
        Metric("data/tokens", "tokens", "Tokens that were sampled since the run began, without evaluations."),
        Metric("data/tokens_learned", "tokens", "Tokens among them in groups that an update learned from."),
        Metric("data/epoch", "number", "Passes over the training examples since the run began."),
    ),
    "Completions": (
        Metric("rollout/length", "tokens", "Sampled tokens of a sample.", jump=3, charted=True,
               advice="answers have become far longer: read some in rollouts/, see algo.overlong_share and max_tokens"),
        Metric("eval/length", "tokens", "Sampled tokens of a sample.", charted=True),
        *both("truncated", "share", "Samples that the limit of tokens cut short.", 0, 0.5,
              "most answers are cut short: raise max_tokens, or see algo.mask_truncated and algo.overlong_share",
              charted=True),
        Metric("rollout/repeated", "share", "Runs of four tokens that came before in the same answer.", 0, 0.5,
              "answers mostly repeat themselves, as in a collapse: read some in rollouts/, or lower optim.optimizer.lr",
              after=3),  # 0.3 in solutions by people, even of letters; 0.97 in a loop
        *both("no_answer", "share", "Graded samples without an answer.", 0, 0.5,
              "most answers are not where the reward looks (box, ####): prompt for that, reward it, or raise max_tokens",
              after=3, charted=True, fault=True),
        *both("timeout", "share", "Samples whose grader ran out of time: their reward is unknown.", 0, 0.02,
              "samples without a verdict teach nothing: see outcome timeout in rollouts/, or raise score_timeout", fault=True),
        *both("error", "share", "Samples whose grader failed: their reward is unknown.", 0, 0,
              "the grader failed, as on a right answer that it cannot read: see reward null in rollouts/", fault=True),
        *both("turns", "count", "Messages of the policy in an episode."),
        *both("out_of_turns", "share", "Episodes that max_turns ended.", 0, 0.5,
              "most episodes do not end by themselves: raise max_turns, or reward an answer", after=3, fault=True),
        *both("env_error", "share", "Episodes whose environment raised: their reward is unknown.", 0, 0.02,
              "environments raise, and those samples teach nothing: look for env_error in rollouts/", fault=True),
        *both("env_timeout", "share", "Episodes whose environment took too long: their reward is unknown.", 0, 0.02,
              "episodes that were cut off teach nothing: raise step_timeout, or see env_error in rollouts/", fault=True),
        *both("tool_calls", "count", "Calls of tools in an episode."),
        *both("no_tool_call", "share", "Episodes that use none of the tools they have.", 0, 0.9,
              "the tools are hardly used: describe them in the prompt, see renderer.tool_calls and rollouts/", after=3,
              fault=True),
        *both("tool_failures", "count", "Calls of tools that failed, in an episode.", fault=True),
        *both("malformed_calls", "count", "Messages of an episode whose call of a tool cannot be read.", 0, 0.5,
              "calls of tools cannot be read: see renderer.tool_calls and rollouts/", after=3, fault=True),
        Metric("rollout/tokens", "tokens", "Sampled tokens of the whole rollout."),
        *both("samples", "text", "The first samples as text, in the loggers that show text."),
    ),
    "Policy update": (
        Metric("loss/grad_norm", "number", "Norm of the gradient before it is clipped, mean over updates.", jump=20,
               advice="the gradient has jumped: look for odd samples in this rollout, and at optim.max_grad_norm",
               charted=True),
        Metric("loss/skipped", "share", "Updates that were skipped because their gradient is not finite.", high=0.0,
               advice="an update was skipped: python train.py replay=RUN/skipped/UPDATE.ckpt shows the tokens"),
        Metric("loss/entropy", "nats", "Entropy of the policy's next token.", 1e-3, after=3, charted=True,
               advice="samples hardly differ any more: raise algo.surrogate.high or algo.entropy.coef"),
        Metric("loss/ratio", "number", "Probability under the policy over that under the old policy, at algo.level.", 0.8, 1.2,
               f"the policy moves far within one rollout: {SLOWER}", charted=True),
        Metric("loss/ratio_min", "number", "The smallest ratio of any token."),
        Metric("loss/ratio_max", "number", "The largest ratio of any token."),
        Metric("loss/clip_fraction_high", "share", "Tokens beyond the upper bound of the ratio, or at e^20.", 0, 0.3, CLIPPED,
               charted=True),
        Metric("loss/clip_fraction_low", "share", "Tokens beyond the lower bound of the ratio, or at e^-20.", 0, 0.3, CLIPPED),
        Metric("loss/approx_kl", "nats", "KL between the policy and the one that the ratio compares with (estimator k3).",
               high=0.5, advice=f"the policy has left the one that sampled: {SLOWER}", stop=10, charted=True),
        Metric("loss/first_kl", "nats", "The same in the first update of a rollout, before the policy moves.", 0, 0.01,
               "the policy differs from the one that sampled before its first step: the engine may hold old weights",
               stale=0.5, stop=1.0),
        Metric("loss/kl", "nats", "KL of algo.kl, where it is in the loss.", high=0.5, advice="the policy is far from the "
               "target of algo.kl (0.01 to 0.1 is usual): lower optim.optimizer.lr or raise algo.kl.coef", charted=True),
        Metric("rollout/logprob_gap", "nats", "Mean absolute difference between the log-probabilities of engine and trainer.",
               0, 0.03, "engine and trainer disagree: the engine may hold old weights, or compute at a lower precision "
               "(healthy in bfloat16: 0.010 to 0.018); algo/correction=tis reduces the effect",
               stale=0.3, stop=1.0, charted=True),  # stale: the gap then includes what one rollout taught
        Metric("lr", "number", "Learning rate, mean over updates.", charted=True),
        Metric("rollout/logprob_gap_max", "nats", "The largest such difference of any token."),
        Metric("rollout/rollout_logprobs", "nats", "Mean log-probability of the sampled tokens by the engine."),
        Metric("rollout/old_logprobs", "nats", "Mean log-probability of the sampled tokens by the trainer, before the update."),
        Metric("rollout/rollout_logprobs_std", "nats", "Standard deviation of the engine's, over tokens."),
        Metric("rollout/old_logprobs_std", "nats", "Standard deviation of the trainer's, over tokens."),
        Metric("rollout/staleness", "count", "Age of the weights that sampled, in rollouts, mean over tokens.", 0, 1,
               "the engine does not take new weights: its weights are several rollouts old, but rollout.ahead=1 explains one"),
        Metric("loss/policy", "number", "The surrogate's loss of a token, before correction, KL and entropy bonus.", -5,
               per="rollout/advantages_std", advice=f"the policy flees from bad answers without an end: {SLOWER}"),
        Metric("loss/policy_epoch_K", "number", "The same in pass K over the rollout, with algo.num_epochs above 1."),
        Metric("loss/logprobs_positive", "nats", "Mean log-probability of the tokens with a positive advantage."),
        Metric("loss/logprobs_negative", "nats", "Mean log-probability of the tokens with a negative advantage."),
        Metric("loss/entropy_coef", "number", "Coefficient of the entropy bonus."),
        Metric("loss/correction", "number", "Factor of algo.correction."),
        Metric("loss/off_policy_dropped", "share", "Tokens that algo.off_policy_delta leaves out."),
        Metric("loss/NAME", "number", "A number that a surrogate of your own logs."),
    ),
    "Speed and memory": (
        Metric("tokens/s", "tokens/s", "Sampled tokens over the time of rollout, sync and update.", charted=True),
        Metric("memory/rollout", "bytes", "Peak memory during the rollout.", charted=True),
        Metric("memory/update", "bytes", "Peak memory during the update.", charted=True),
        Metric("time/rollout", "seconds", "Sampling and scoring, or waiting for them with rollout.ahead=1."),
        Metric("time/update", "seconds", "Learning from the rollout."),
        Metric("time/sync", "seconds", "Sending the policy's weights to the engine."),
        Metric("time/eval", "seconds", "Evaluation on held-out examples."),
        Metric("time/played", "seconds", "Sampling and scoring during the update before, with rollout.ahead=1."),
    ),
}  # fmt: skip
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
WATCHED = tuple(metric for metric in METRICS if metric.advice)
# time/played overlaps the others
TIMES = tuple(metric.name for metric in METRICS if metric.unit == "seconds" and metric.name != "time/played")


def _pattern(metric: Metric) -> re.Pattern:
    pattern = re.escape(metric.name).replace("NAME", ".+").replace("K", r"\d+")
    return re.compile(pattern.replace("/", "/(.+/)?", 1) if metric.part else pattern)  # a source of a mixture


# patterns that fit any name come last
_ORDERED = sorted(METRICS, key=lambda metric: (metric.name.endswith("/NAME"), "NAME" in metric.name))
_PATTERNS = [(_pattern(metric), metric) for metric in _ORDERED]


@cache
def about(name: str) -> Metric | None:
    """Return the entry of a metric; None if it has none. eval/SET/NAME, of one of several sets, has that of eval/NAME."""
    entry = _entry(name)
    if entry and entry.name == "eval/NAME":
        return _entry(re.sub("^eval/(?!reward/)[^/]+/", "eval/", name))
    return entry


@cache
def _entry(name: str) -> Metric | None:
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def require_metric(key: str, name: str, measured: Iterable[str] = ()) -> None:
    """Raise UserError, with the nearest names, if the value `name` of a key is no metric, or none of those `measured`. Names of
    another kind (eval/, loss/ ...) in `measured` do not count."""
    here = [each for each in measured if each.partition("/")[0] == name.partition("/")[0]]
    if name not in here if here else about(name) is None:
        near = get_close_matches(name, here or [metric.name for metric in METRICS], cutoff=0.3)
        similar = f"; similar: {', '.join(near)}" if near else ""
        whose = " of this run" if here else ""
        raise UserError(f"{key}={name} is no metric{whose}{similar}; docs/algorithms.md lists all")


def is_taken(part: str) -> bool:
    """Return whether rollout/PART or eval/PART is a metric of ours, which a part of the reward must not hide."""
    own_std = any(metric.name == f"rollout/{part}_std" for metric in METRICS)
    return own_std or any(not entry.part for first in ("rollout", "eval") if (entry := _entry(f"{first}/{part}")))


def name_of_part(part: str) -> str:
    """Return the metric of a part of the reward, after rollout/ or eval/: its own name, or reward/NAME if that is taken.

    Two parts never get the same name: a part called reward/NAME, with a taken NAME, becomes reward/reward/NAME.
    """
    bare = re.sub("^(reward/)+", "", part)
    return f"reward/{part}" if is_taken(bare) else part


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"


def written(name: str, value: float | None) -> str:
    """Return a value as text: a share as a percentage, anything else with four digits, - for None and NaN."""
    entry = about(name)
    if value is None or math.isnan(value) or (entry and entry.unit == "share"):
        return percent(value)
    return f"{value:.4g}"


def is_result(name: str, value: float) -> bool:
    """Return whether a number of an evaluation is shown: not its time, and not a fault that never happened."""
    entry = about(name)
    return name.startswith("eval/") and (value != 0 or not (entry and entry.fault))


def metric_table() -> str:
    """Return all metrics as a Markdown table."""
    lines = ["| metric | unit | what it is | healthy | ends the run |", "|---|---|---|---|---|"]
    for title, metrics in GROUPS.items():
        lines.append(f"| **{title}** | | | | |")
        for words, same in groupby(metrics, key=lambda metric: metric.words):
            first, *others = same
            names = " ".join(f"`{metric.name}`" for metric in (first, *others))
            stop = f"above {first.stop:g}" if first.stop < math.inf else ""
            lines.append(f"| {names} | {first.unit} | {words} | {_healthy(first)} | {stop} |")
    return "\n".join(lines)


def _healthy(metric: Metric) -> str:
    if not metric.advice:
        return ""
    if metric.jump < math.inf:
        return f"at most {metric.jump:g} times its median"
    if metric.per:
        return f"at least {metric.low:g} times `{metric.per}`"
    if metric.name == "eval/accuracy":
        return "its interval reaches that of the best one"
    if metric.falls < math.inf:
        return f"not {metric.falls:g} below its best while the reward is higher"
    within = f"{metric.low:g} to {metric.high:g}" if metric.low > 0 else f"at most {metric.high:g}"
    within = within.replace(" to inf", " or more")
    late = f", {metric.after} rollouts in a row" if metric.after > 1 else ""
    stale = f" ({metric.stale:g} with samples of older weights)" if metric.stale else ""
    return f"{'above 0' if 0 < metric.low < 1e-6 else within}{stale}{late}"


if __name__ == "__main__":
    print(metric_table())
