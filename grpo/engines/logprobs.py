"""The rule for a log-probability that somebody else has computed: an engine, a server, a file of samples."""

import math

ROUNDING = 1e-3  # it may come from a 16-bit number


def is_logprob(value: float) -> bool:
    """Return whether a number can be the log-probability of a sampled token."""
    return -math.inf < value <= ROUNDING
