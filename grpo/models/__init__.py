"""The policy, the reference, log-probabilities."""

from collections.abc import Callable

# called with each model before it is tried on a plan (packed_attention.py), to let its layers without attention follow plans, too
FOLLOWERS: list[Callable[..., None]] = []
