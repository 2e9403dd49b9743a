"""Checks of the engine: it reports the policy's log-probabilities, draws by them, and takes new weights."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import binom, chi2
from torch import Tensor

from grpo.extras.preflight.checked import COARSE, Checked, mean_gap, pass_or_fail
from grpo.extras.preflight.moved import one_of_each_kind
from grpo.extras.preflight.probe import Probe
from grpo.extras.preflight.rounding import odds
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.errors import plural

FIRST_DRAWS, WANTED = 20, 100  # the first ones show the engine's speed; so many are enough
DRAWS, MOST_DRAWS = 500, 2000  # at once, and in all
PATIENCE = 4.0  # seconds, or a part of the checks' time: a slow engine draws only as often as it can meanwhile
HEAT = 0.01  # a share by which temperatures may seem to differ
CUTS = (0.8, 0.9, 0.95, 0.99)  # shares of the probability that a filter may leave
RARE = 1e-6  # a p-value below it is a fault, not chance
DOUBT = 0.01  # below it more draws decide
ENGINE = "an engine option, generation_config.json or a proxy changes the sampling: remove it"


def logprobs(probe: Probe) -> Checked:
    """The engine's log-probabilities of the tokens that it sampled equal the trainer's, except for rounding, and the differences
    are not those of another temperature, which a bound for 16 bits would hide; nor, with 16 bits, do log-odds differ more."""
    theirs, tokens, (ours, entropy) = probe.compared.rollout_logprobs, probe.compared, probe.passed
    gap, (bound, odds_bound) = mean_gap(theirs, ours, tokens), probe.bounds
    apart = (theirs - ours)[tokens.mask]
    heat, error = warmer(apart, (ours + entropy)[tokens.mask], beginnings(tokens))
    text = f"mean gap {gap:.1e} nats over {plural(int(tokens.mask.sum()), 'token')}, bound {bound:.1e}"
    remedy = "engine and trainer compute different numbers: look at temperature, dtype, the chat template's ids and the weights"
    if hot := abs(heat) > max(HEAT, 6 * error):
        text += f", as at a temperature {heat:+.1%} from the trainer's"
    far = False
    if probe.eps > COARSE:
        far = (of_odds := odds(apart, ours[tokens.mask])) > odds_bound
        text += f", {of_odds:.2g} in log-odds, bound {odds_bound:.2g}"
    return pass_or_fail(gap <= bound and not hot and not far, text, remedy)


def beginnings(tokens: TokenBatch) -> Tensor:
    """Return a number for each sampled token, [n], which those have in common that follow the same tokens: the first ones of a
    group do, so that rounding is the same for all of them."""
    known: dict[tuple[Any, ...], int] = {}  # by what is before the last token, and that token
    numbers = []
    for (prompt, completion), sampled in zip(tokens.sequences(), tokens.mask.tolist(), strict=True):
        before = known.setdefault((prompt,), len(known))
        for token, counts in zip(completion, sampled, strict=False):  # the mask is as wide as the longest
            numbers += [before] * counts
            before = known.setdefault((before, token), len(known))
    return torch.tensor(numbers).unique(return_inverse=True)[1]


def warmer(apart: Tensor, above: Tensor, places: Tensor) -> tuple[float, float]:
    """Return by how much the engine's temperature is higher, as a share, and the standard error: d log p / d log T is minus what
    log p has above its mean, the entropy with its sign. apart: differences of n tokens' log p, [n]; above: [n].

    The error is that of a regression whose noise differs between places and is one within a place (MacKinnon and White's HC3, by
    clusters): rare tokens have most of the noise and of the weight, and one of them alone must not seem a temperature.
    """
    apart, above = apart.double().cpu(), above.double().cpu()
    size = (above**2).sum().clamp(min=1e-9)
    heat = -(apart * above).sum() / size
    pulls, weights = torch.zeros(2, len(apart), dtype=torch.double)
    pulls.index_add_(0, places, above * (apart + heat * above))
    weights.index_add_(0, places, above**2 / size)
    return float(heat), float((pulls / (1 - weights).clamp(min=1e-9)).norm() / size)


def draws(probe: Probe) -> Checked:
    """Draws follow the probabilities that the engine reports: Pearson's chi-square of at most MOST_DRAWS draws at one place. Nor
    are tokens missing that are rare for the trainer, as with a filter. If a device is in DOUBT, all go on three times as long.

    The place is the one with the highest entropy, where a filter, a penalty or another temperature changes most. An engine may
    read all tokens before it for each draw: where WANTED draws would take too long, these are the last ones, 8 at least.
    """
    tokens, entropy, patience = probe.compared, probe.passed[1], min(PATIENCE, probe.allowance.left(1 / 5))
    row, at = divmod(int(entropy.argmax()), entropy.shape[1])
    prompt, completion = tokens.sequences()[row]
    context, fit = [*prompt, *completion[:at]], int(patience / WANTED / probe.token_seconds)
    sees = min(context) < 0
    context = context if sees else context[-max(8, fit) :]  # a picture has no parts
    shares = shares_after(probe, [token for token in context if token >= 0])  # each device passes once
    shares = None if sees else shares
    drawn = drawn_in(probe, context, patience)
    bars, p_value, tail = chances(drawn, shares)
    if any(distributed.all_gather([bars > 1 and RARE <= min(p_value, tail) < DOUBT])):
        drawn += drawn_in(probe, context, 3 * patience, len(drawn))
        bars, p_value, tail = chances(drawn, shares)
    total, kinds = len(drawn), len({token for token, _ in drawn})
    if bars < 2:
        thin = f"no token of {kinds} is likely enough for {total} draws to tell"
        return Checked("SKIP", thin if kinds > 1 else "the policy is certain everywhere: all draws are equal")
    text = f"{total} draws among {kinds} tokens, p = {min(p_value, tail):.2g}"
    text += ": rare tokens are missing" if tail < min(RARE, p_value) else ""
    remedy = f"the engine draws from another distribution than it reports: {ENGINE}"
    return pass_or_fail(min(p_value, tail) >= RARE, text, remedy)


def drawn_in(probe: Probe, context: Sequence[int], seconds: float, others: int = 0) -> list[tuple[int, float]]:
    """Return the draws after a context that take these seconds, FIRST_DRAWS at least, each with the log-probability that the
    engine reports. others: how many have been drawn before; together they are at most MOST_DRAWS."""
    at_once = min(DRAWS, max(FIRST_DRAWS, probe.rollouts.plan.prompts * probe.rollouts.plan.group_size))
    drawn, begun, most = [], time.perf_counter(), MOST_DRAWS - others
    with probe.rollouts.while_sampling():  # each device for itself, as often as it can
        while len(drawn) < most:
            spent = time.perf_counter() - begun
            if drawn and spent >= seconds:
                break
            fit = 1 + int(len(drawn) * (seconds / spent - 1)) if drawn else FIRST_DRAWS
            count = min(fit, at_once, most - len(drawn))
            batch = probe.sample([context] * count, max_tokens=1, others=others + len(drawn))
            drawn += zip(batch.ids[:, batch.prompt_width].tolist(), batch.rollout_logprobs[:, 0].tolist(), strict=True)
    return drawn


def chances(drawn: Sequence[tuple[int, float]], shares: np.ndarray | None) -> tuple[int, float, float]:
    """Return the bins of the chi-square test, its p-value, and that of `missing`; 1 for what cannot be tested."""
    tokens, reported = map(np.array, zip(*drawn, strict=True))
    _, where, counts = np.unique(tokens, return_index=True, return_counts=True)
    observed, expected = bins(counts, np.exp(reported)[where])
    if len(observed) < 2:
        return len(observed), 1.0, 1.0
    p_value = float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1))
    return len(observed), p_value, 1.0 if shares is None else missing(tokens, shares)


@torch.no_grad()
def shares_after(probe: Probe, context: Sequence[int]) -> np.ndarray:
    """Return the probabilities of the next token that the policy has at the temperature of `probe.sample`, [V]."""
    ids, settings = torch.tensor([context], device=probe.module.device), probe.rollouts.plan.sampling
    probe.sleep()
    logits = probe.module.policy(input_ids=ids, use_cache=False).logits[0, -1]
    return (logits.double() / [*settings.temperatures, settings.temperature][0]).softmax(-1).cpu().numpy()


def missing(drawn: np.ndarray, shares: np.ndarray) -> float:
    """Return the probability that so few draws have a rare token, times the number of CUTS, for the one with the least. Rare are
    tokens for which likelier ones have that share together. shares: the probability of each token."""
    order = np.argsort(-shares, kind="stable")
    likelier = np.empty_like(shares)
    likelier[order] = np.cumsum(shares[order]) - shares[order]
    rare = [likelier >= cut for cut in CUTS]
    return len(CUTS) * min(float(binom.cdf(one[drawn].sum(), len(drawn), min(1.0, shares[one].sum()))) for one in rare)


def bins(counts: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the observed and the expected numbers of draws in each bin of the chi-square test, [bins] each.

    counts, shares: how often each token was drawn, and the probability that the engine reports for it, [tokens] each. A token
    that is expected five times or more has a bin of its own. The others share one, or join the largest if that expects fewer.
    """
    total = counts.sum()
    often = shares * total >= 5
    observed, expected = counts[often], shares[often] * total
    others, expected_others = counts[~often].sum(), max(0.0, 1 - shares[often].sum()) * total
    if expected_others >= 5:
        return np.append(observed, others), np.append(expected, expected_others)
    largest = observed.argmax()
    observed[largest] += others
    expected[largest] += expected_others
    return observed, expected


def sync(probe: Probe) -> Checked:
    """New weights reach the engine, all kinds of them, and the old ones return: caches of prefixes are emptied."""
    first = probe.rollouts.plan.num_rollouts + 1  # versions of no rollout: servers keep adapters by version
    result, text = probe.moved(one_of_each_kind(probe.module.policy), probe.few, first)
    remedy = "the engine keeps old weights or an old cache: set engine=transformers, and report this with the engine's version"
    return Checked(result, text, remedy if result == "FAIL" else "")
