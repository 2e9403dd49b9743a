"""Which prompts belong to which rollout: what a sampler is, and the one that gives every example once a pass."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from grpo.env.types import Example
from grpo.system.errors import UserError


class Sampler(Protocol):
    """The type of the slot `sampler`, built with (examples, size, seed). samplers.py has more of them.

    `observe(results)` is optional. It is called after each rollout with all groups that were played, even those that the
    selection left out: pairs of an example and the rewards of its samples. With `state_dict` and `load_state_dict` a sampler is
    resumed as it was.
    """

    def draw(self, rollout: int, count: int, first: int = 0) -> list[Example]:
        """Return `count` examples for a rollout, or all that are left, without the `first` ones, which were drawn for it before.
        They depend on the state and on these numbers alone, since a rollout may be drawn twice."""

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts."""


class Uniform:
    """Gives each rollout `size` examples; every pass over the examples has its own order.

    The prompts of rollout r are a function of (seed, r) alone, so a resumed run needs only r.
    """

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        if len(examples) < size:
            more = f"rollout.prompts={size} is more than the {len(examples)} training examples there are"
            raise UserError(f"{more}: lower it or raise the task's limit")
        self.examples, self.size, self.seed = examples, size, seed

    def places(self, rollout: int) -> list[int]:
        """Return the indices of a rollout's examples. If a pass does not divide into rollouts, one of them spans two passes."""
        count = len(self.examples)
        first = rollout * self.size
        places = [divmod(i, count) for i in range(first, first + self.size)]
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(count) for epoch, _ in places}
        return [int(orders[epoch][i]) for epoch, i in places]

    def draw(self, rollout: int, count: int, first: int = 0) -> list[Example]:
        """Return `count` examples: first those of the pass, then others in an order of the rollout's own."""
        places = self.places(rollout)
        if first + count > self.size:
            order = np.random.default_rng([self.seed, rollout, len(self.examples)]).permutation(len(self.examples))
            places += map(int, order[~np.isin(order, places)])
        return [self.examples[i] for i in places[first : first + count]]

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts: prompts, even those left out of an update, and passes over the examples."""
        prompts = rollouts * self.size
        return {"data/prompts": float(prompts), "data/epoch": prompts / len(self.examples)}
