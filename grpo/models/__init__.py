"""The policy, the reference, log-probabilities."""

from collections.abc import Callable
from typing import Any

# called with each model before it is tried on a plan (packed_attention.py), to let its layers without attention follow plans;
# each returns the cache with which the built-in engine samples from the model, or None
FOLLOWERS: list[Callable[..., Any]] = []
