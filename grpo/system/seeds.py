"""Seeds as paths: every draw of a run has a seed that does not depend on the order of the draws."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

TRAIN, EVALUATION, SHUFFLE, REPLAY = range(4)  # second in the path of a seed: its purpose
_alone = threading.Lock()


@lru_cache(1 << 12)  # an environment's seeds are asked for by every sample of its group
def derive_seed(*path: int) -> int:
    """Return a 63-bit seed that depends on every number of the path, such as (run, TRAIN, rollout, prompt, sample, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> 1)


def random_states() -> dict[str, Any]:
    """Return the states of the global generators, which users' code may draw from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    host = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return host | {"cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def own_randomness() -> Iterator[None]:
    """Keep code that seeds Python's or NumPy's global generators to itself: one thread at a time, and their states come back."""
    with _alone:
        before = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
