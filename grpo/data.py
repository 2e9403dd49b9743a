"""Layer 2 - examples in a seeded order, and the batch that travels from prompts to loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from grpo.errors import UserError
from grpo.evaluation import Evaluation
from grpo.renderer import Renderer
from grpo.rl import Example, Split, Task
from grpo.rollout import Group
from grpo.tokens import Scores, TokenBatch


@dataclass
class PromptBatch:
    """One rollout's worth of work. Mutable: Lightning hands the same object to every hook, and each adds what it made."""

    rollout: int  # 0 for the first of the run
    examples: list[Example]
    groups: list[Group] = field(default_factory=list)
    tokens: TokenBatch | None = None
    scores: Scores | None = None
    advantages: list[list[float]] = field(default_factory=list)  # as groups; the mean over a sample's tokens
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)

    def to(self, *args, **kwargs) -> Self:
        """Called by Lightning before any hook, when there are no tensors yet."""
        return self


class PromptLoader:
    """Endless batches of `size` examples; every pass over the examples has its own order.

    Batch r is a function of (seed, r) alone, so that to resume is to set `start`: nothing else has to be remembered, and
    whatever Lightning fetched ahead does not matter.
    """

    def __init__(self, examples: Sequence[Example], size: int, seed: int) -> None:
        if len(examples) < size:
            raise UserError(
                f"rollout.prompts={size} is more than the {len(examples)} training examples there are: lower it or raise "
                "the task's limit"
            )
        self.examples, self.size, self.seed = examples, size, seed
        self.start = 0

    def places(self, rollout: int) -> list[int]:
        """The examples of a rollout by index. A pass that does not divide into batches gives its tail to the next pass."""
        count = len(self.examples)
        first = rollout * self.size
        places = [divmod(i, count) for i in range(first, first + self.size)]
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(count) for epoch, _ in places}
        return [int(orders[epoch][i]) for epoch, i in places]

    def batch(self, rollout: int) -> PromptBatch:
        return PromptBatch(rollout, [self.examples[i] for i in self.places(rollout)])

    def more(self, rollout: int, count: int, skip: int) -> list[Example]:
        """`count` further examples for a rollout, or as many as there are: in an order of its own, after the first `skip`."""
        order = np.random.default_rng([self.seed, rollout, len(self.examples)]).permutation(len(self.examples))
        others = [int(i) for i in order[~np.isin(order, self.places(rollout))]]
        return [self.examples[i] for i in others[skip : skip + count]]

    def __iter__(self) -> Iterator[PromptBatch]:
        rollout = self.start
        while True:
            yield self.batch(rollout)
            rollout += 1


def check_prompts(
    task: Task,
    renderer: Renderer,
    context: int,
    max_tokens: int,
    splits: Sequence[Split] = ("train", "test"),
    most: int = 500,
) -> None:
    """Refuse prompts that leave no room for an answer in the model's context. Looks at the first `most` of each split;
    the engine refuses the rest when it meets them. Raises UserError that names the example."""
    for split in splits:
        examples = task.examples(split)
        for i in range(min(len(examples), most)):
            length = len(renderer.prompt_ids(task.build(examples[i]).start().messages))
            if length + max_tokens > context:
                raise UserError(
                    f"the prompt of {split} example {i + 1} has {length} tokens: with max_tokens={max_tokens} that exceeds the "
                    f"model's context of {context}; lower max_tokens, shorten the prompt, or take another model"
                )
