"""Seeds as paths: one seed for every draw of a run, whatever the order of the draws."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

TRAIN, EVALUATION, SHUFFLE = range(3)  # second in the path of a seed: what the noise is for


def derive_seed(*path: int) -> int:
    """A 63-bit seed that depends on every number of the path, as (run, TRAIN, rollout, prompt, sample, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> 1)


def random_states() -> dict[str, Any]:
    """Of the global generators, which other people's code may use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    known = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return known | {"cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
