"""Seeds as paths, which do not depend on the order of the draws; states of generators and objects, which checkpoints keep."""

import logging
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import torch

TRAIN, EVALUATION, SHUFFLE, REPLAY = range(4)  # second in the path of a seed: its purpose
_alone = threading.Lock()


@lru_cache(1 << 12)  # an environment's seeds are asked for by every sample of its group
def derive_seed(*path: int) -> int:
    """Return a 63-bit seed that depends on every number of the path, such as (run, TRAIN, rollout, prompt, sample, turn)."""
    # a hash, not the next number of a generator: a resumed run, or another order of samples, would draw other numbers
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
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])  # the run may have had more


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


log = logging.getLogger(__name__)


def everything(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators and of these objects."""
    return {"random": random_states(), "objects": states_of(objects), "kinds": kinds_of(objects)}


def set_everything(objects: Mapping[str, Any], saved: Mapping[str, Any], same_seed: bool = True) -> None:
    """Restore what `everything` returned: the generators if they began with the `same_seed`, and the objects that are of the same
    class. Another one begins without a state, and a warning says so."""
    if same_seed:
        set_random_states(saved["random"])
    now, states = kinds_of(objects), dict(saved.get("objects", {}))
    then = now | saved.get("kinds", {})
    for name in [name for name in now if then[name] != now[name]]:
        if states.pop(name, None):
            log.warning("the checkpoint has a state of %s %s: %s begins without one", name, then[name], now[name])
    set_states(objects, states)


def kinds_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each object's class."""
    return {name: type(item).__qualname__ for name, item in objects.items()}


def states_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state_dict of each object that has one, by its name."""
    stateful = {name: item for name, item in objects.items() if hasattr(item, "state_dict")}
    # copies: the objects change in the rollout, and a checkpoint in its middle has their states before it
    return {name: deepcopy(item.state_dict()) for name, item in stateful.items()}


def set_states(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load the states into the objects of these names. A state that no object takes gets a warning."""
    for name, state in states.items():
        item = objects.get(name)
        if hasattr(item, "load_state_dict"):
            item.load_state_dict(state)
        else:
            log.warning("the checkpoint has a state of %s, which nothing here takes", name)
