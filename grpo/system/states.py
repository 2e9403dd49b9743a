"""States that checkpoints keep: those of the random generators, and of objects such as a reward that adapts."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from grpo.system.seeds import random_states, set_random_states

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
    return {name: deepcopy(item.state_dict()) for name, item in stateful.items()}


def set_states(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load the states into the objects of these names. A state that no object takes gets a warning."""
    for name, state in states.items():
        item = objects.get(name)
        if hasattr(item, "load_state_dict"):
            item.load_state_dict(state)
        else:
            log.warning("the checkpoint has a state of %s, which nothing here takes", name)
