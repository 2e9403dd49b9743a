"""Seeds do not depend on the order of draws; states of generators and objects come back as they were."""

import random

import numpy as np
import torch

from grpo.system.seeds import (
    derive_seed,
    everything,
    own_randomness,
    random_states,
    set_everything,
    set_random_states,
    states_of,
)


class Counter:
    """An object whose state is its own list, which it changes."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]


class Other(Counter):
    """Another class with the same state."""


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_every_number_of_a_path_counts_and_its_order_too():
    paths = [(7, 0, 1), (7, 1, 0), (7, 0, 2), (8, 0, 1), (7, 0), (7, 0, 1, 1)]
    assert len({derive_seed(*path) for path in paths}) == len(paths)
    assert all(derive_seed(*path) == derive_seed(*path) < 2**63 for path in paths)


def test_each_generator_goes_on_where_it_was():
    states = random_states()
    first, second = drawn(), drawn()
    set_random_states(states)
    assert (drawn(), drawn()) == (first, second) and all(a != b for a, b in zip(first, second, strict=True))


def test_a_state_is_a_copy():
    counter = Counter()
    states = states_of({"a": counter, "b": object()})
    counter.seen.append(1)
    assert states == {"a": {"seen": []}}


def test_generators_come_back_with_the_same_seed_and_objects_of_the_same_class(caplog):
    counter, other = Counter(), Counter()
    counter.seen, other.seen = [1], [2]
    saved = everything({"a": counter, "b": other})
    first = drawn()
    anew, another = Counter(), Other()
    set_everything({"a": anew, "b": another}, saved)
    assert (anew.seen, another.seen) == ([1], []) and drawn() == first
    assert "the checkpoint has a state of b Counter: Other begins without one" in caplog.text
    set_everything({}, saved | {"objects": {}}, same_seed=False)
    assert drawn() != first


def test_code_that_seeds_the_generators_keeps_that_to_itself():
    states = random_states()
    expected = drawn()
    set_random_states(states)
    with own_randomness():
        random.seed(0)
        np.random.seed(0)
    assert drawn() == expected
