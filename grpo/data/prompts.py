"""Examples in a seeded order: which prompts belong to which rollout."""

from collections.abc import Sequence

import numpy as np

from grpo.env.types import Example
from grpo.system.errors import UserError


class PromptLoader:
    """`size` examples for each rollout; every pass over the examples has its own order.

    The prompts of rollout r are a function of (seed, r) alone: a run that is resumed needs to remember nothing but r.
    """

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        if len(examples) < size:
            fix = "lower it or raise the task's limit"
            raise UserError(
                f"rollout.prompts={size} is more than the {len(examples)} training examples there are: {fix}"
            )
        self.examples, self.size, self.seed = examples, size, seed

    def places(self, rollout: int) -> list[int]:
        """The examples of a rollout by index. A pass that does not divide into batches gives its tail to the next pass."""
        count = len(self.examples)
        first = rollout * self.size
        places = [divmod(i, count) for i in range(first, first + self.size)]
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(count) for epoch, _ in places}
        return [int(orders[epoch][i]) for epoch, i in places]

    def batch(self, rollout: int) -> list[Example]:
        return [self.examples[i] for i in self.places(rollout)]

    def progress(self, rollouts: int) -> dict[str, float]:
        """Metrics after so many rollouts: prompts, those left out of an update included, and passes over the examples."""
        prompts = rollouts * self.size
        return {"data/prompts": float(prompts), "data/epoch": prompts / len(self.examples)}

    def more(self, rollout: int, count: int, skip: int) -> list[Example]:
        """`count` further examples for a rollout, or as many as there are: in an order of its own, after the first `skip`."""
        order = np.random.default_rng([self.seed, rollout, len(self.examples)]).permutation(len(self.examples))
        others = [int(i) for i in order[~np.isin(order, self.places(rollout))]]
        return [self.examples[i] for i in others[skip : skip + count]]
