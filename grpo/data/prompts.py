"""Examples in a seeded order: which prompts belong to which rollout."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from grpo.env.types import Example
from grpo.system.errors import UserError


class Loader(Protocol):
    """The slot `loader`, made with (examples, size, seed). With `state_dict` and `load_state_dict` it is resumed as it was."""

    def batch(self, rollout: int) -> list[Example]:
        """Return the examples of a rollout, the same ones each time that they are asked for."""

    def more(self, rollout: int, count: int, skip: int) -> list[Example]:
        """Return at most `count` further examples for a rollout, after `skip` that it has already got here."""

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts."""


class PromptLoader:
    """Gives each rollout `size` examples; every pass over the examples has its own order.

    The prompts of rollout r are a function of (seed, r) alone, so a resumed run needs only r.
    """

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        if len(examples) < size:
            more = f"rollout.prompts={size} is more than the {len(examples)} training examples there are"
            raise UserError(f"{more}: lower it or raise the task's limit")
        self.examples, self.size, self.seed = examples, size, seed

    def places(self, rollout: int) -> list[int]:
        """Return the indices of a rollout's examples. If a pass does not divide into batches, a batch spans two passes."""
        count = len(self.examples)
        first = rollout * self.size
        places = [divmod(i, count) for i in range(first, first + self.size)]
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(count) for epoch, _ in places}
        return [int(orders[epoch][i]) for epoch, i in places]

    def batch(self, rollout: int) -> list[Example]:
        """Return the examples of a rollout."""
        return [self.examples[i] for i in self.places(rollout)]

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts: prompts, even those left out of an update, and passes over the examples."""
        prompts = rollouts * self.size
        return {"data/prompts": float(prompts), "data/epoch": prompts / len(self.examples)}

    def more(self, rollout: int, count: int, skip: int) -> list[Example]:
        """Return `count` further examples for a rollout, or all that are left: in an order of its own, after the first `skip`."""
        order = np.random.default_rng([self.seed, rollout, len(self.examples)]).permutation(len(self.examples))
        others = [int(i) for i in order[~np.isin(order, self.places(rollout))]]
        return [self.examples[i] for i in others[skip : skip + count]]
