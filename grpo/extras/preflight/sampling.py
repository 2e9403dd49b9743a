"""Checks of the engine: it reports the policy's log-probabilities, draws by them, and takes new weights."""

import time

import numpy as np
from scipy.stats import chi2
from torch import Tensor

from grpo.extras.preflight.checked import Checked, mean_gap, pass_or_fail
from grpo.extras.preflight.probe import Probe
from grpo.system.errors import plural

FIRST_DRAWS, WANTED = 20, 100  # the first ones show the engine's speed; so many are enough
DRAWS, MOST_DRAWS = 500, 2000  # at once, and in all
PATIENCE = 4.0  # seconds, or a part of the checks' time: a slow engine draws only as often as it can meanwhile
HEAT = 0.01  # a share by which temperatures may seem to differ
RARE = 1e-6  # a p-value below it is a fault, not chance
ENGINE = "an engine option, generation_config.json or a proxy changes the sampling: remove it"


def logprobs(probe: Probe) -> Checked:
    """The engine's log-probabilities of the tokens that it sampled equal the trainer's, except for rounding, and the differences
    are not those of another temperature, which a bound for 16 bits would hide."""
    theirs, tokens, (ours, entropy) = probe.compared.rollout_logprobs, probe.compared, probe.passed
    gap = mean_gap(theirs, ours, tokens)
    heat, error = warmer((theirs - ours)[tokens.mask], (ours + entropy)[tokens.mask])
    text = f"mean gap {gap:.1e} nats over {plural(int(tokens.mask.sum()), 'token')}, bound {probe.bound:.1e}"
    remedy = "engine and trainer compute different numbers: look at temperature, dtype, the chat template's ids and the weights"
    if hot := abs(heat) > max(HEAT, 6 * error):
        text += f", as at a temperature {heat:+.1%} from the trainer's"
    return pass_or_fail(gap <= probe.bound and not hot, text, remedy)


def warmer(apart: Tensor, above: Tensor) -> tuple[float, float]:
    """Return by how much the engine's temperature is higher, as a share, and the standard error: d log p / d log T is minus what
    log p has above its mean, the entropy with its sign. apart: differences of n tokens' log p, [n]; above: [n]."""
    apart, above = apart.double(), above.double()
    size = (above**2).sum().clamp(min=1e-9)
    heat = -(apart * above).sum() / size
    rest = (apart + heat * above).square().mean() / size
    return float(heat), float(rest.sqrt())


def draws(probe: Probe) -> Checked:
    """Draws follow the probabilities that the engine reports: Pearson's chi-square of at most MOST_DRAWS draws at one place.

    The place is the one with the highest entropy, where a filter, a penalty or another temperature changes most. An engine may
    read all tokens before it for each draw: where WANTED draws would take too long, these are the last ones, 8 at least.
    """
    tokens, entropy, patience = probe.compared, probe.passed[1], min(PATIENCE, probe.allowance.left(1 / 5))
    at_once = min(DRAWS, max(FIRST_DRAWS, probe.rollouts.plan.prompts * probe.rollouts.plan.group_size))
    row, at = divmod(int(entropy.argmax()), entropy.shape[1])
    prompt, completion = tokens.sequences()[row]
    context, fit = [*prompt, *completion[:at]], int(patience / WANTED / probe.token_seconds)
    if min(context) >= 0:  # a picture has no parts
        context = context[-max(8, fit) :]
    drawn, reported, begun = [], [], time.perf_counter()
    with probe.rollouts.while_sampling():  # each device for itself, as often as it can
        while len(drawn) < MOST_DRAWS:
            spent = time.perf_counter() - begun
            if drawn and spent >= patience:
                break
            fit = 1 + int(len(drawn) * (patience / spent - 1)) if drawn else FIRST_DRAWS
            count = min(fit, at_once, MOST_DRAWS - len(drawn))
            batch = probe.sample([context] * count, max_tokens=1, others=len(drawn))
            drawn += batch.ids[:, batch.prompt_width].tolist()
            reported += batch.rollout_logprobs[:, 0].tolist()
    ids, where, counts = np.unique(drawn, return_index=True, return_counts=True)
    total = len(drawn)
    observed, expected = bins(counts, np.exp(reported)[where])
    if len(observed) < 2:
        thin = f"no token of {len(ids)} is likely enough for {total} draws to tell"
        return Checked("SKIP", thin if len(ids) > 1 else "the policy is certain everywhere: all draws are equal")
    p_value = chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)
    text = f"{total} draws among {len(ids)} tokens, p = {p_value:.2g}"
    return pass_or_fail(
        bool(p_value >= RARE), text, f"the engine draws from another distribution than it reports: {ENGINE}"
    )


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
    result, text = probe.moved(probe.one_of_each_kind(), probe.few, first)
    remedy = "the engine keeps old weights or an old cache: set engine=transformers, and report this with the engine's version"
    return Checked(result, text, remedy if result == "FAIL" else "")
