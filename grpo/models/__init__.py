"""The policy, the reference, log-probabilities."""

from collections.abc import Callable

# called with each model that is tried on a plan (packed_attention.py): what lets its layers follow plans that have no attention
FOLLOWERS: list[Callable[..., None]] = []
