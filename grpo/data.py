"""Layer 2 - examples in a seeded order, and the batch that travels from prompts to loss."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from grpo.coroutines import awaited
from grpo.errors import UserError
from grpo.evaluation import Evaluation
from grpo.renderer import Renderer
from grpo.rl import Example, Split, Task, build, state_of
from grpo.rollout import Group
from grpo.rows import picked
from grpo.tokens import Scores, TokenBatch

log = logging.getLogger(__name__)


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


def prompt_tokens(task: Task, example: Example, renderer: Renderer) -> int:
    """How many the first prompt has; 0 where its environment does not begin: its episodes will say so, see `play`."""
    try:
        state = state_of(awaited(build(task, example, 0).start()))
    except UserError:
        raise
    except Exception:
        return 0
    return len(renderer.prompt_ids(state.messages, state.tools))


def longest_prompt(task: Task, examples: Sequence[Example], renderer: Renderer, looks: int = 100) -> int:
    """Tokens of the longest of at most `looks` prompts, from everywhere among the examples."""
    places = range(0, len(examples), math.ceil(len(examples) / looks))
    return max(prompt_tokens(task, examples[i], renderer) for i in places)


@dataclass(frozen=True)
class PromptLimit:
    """How long prompts may be, and what becomes of longer ones.

    max_tokens: of a prompt; None for what the answer leaves of the model's context. too_long: "refuse" the run, "drop" the
    example, or "truncate" the prompt from the left, so that its end stays.
    """

    max_tokens: int | None = None
    too_long: str = "refuse"
    why: str = ""  # the number, in words
    by_context: bool = False  # it is what the context leaves, where the engine stops by itself

    def __post_init__(self) -> None:
        if self.too_long not in ("refuse", "drop", "truncate"):
            raise UserError(f"prompt_limit.too_long={self.too_long} is not one of refuse, drop, truncate")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"prompt_limit.max_tokens={self.max_tokens} must be at least 1")

    def within(self, context: int, answer: int) -> "PromptLimit":
        """The same with a number, for a model with `context` tokens of which an answer may take `answer`."""
        if context - answer < 1:
            raise UserError(
                f"max_tokens={answer} leaves no room for a prompt in the model's context of {context}: lower it"
            )
        room = context - answer
        if self.max_tokens is not None and self.max_tokens <= room:
            return replace(self, why=f"prompt_limit.max_tokens={self.max_tokens}")
        return replace(
            self,
            max_tokens=room,
            why=f"max_tokens={answer} leaves {room} of the model's context of {context}",
            by_context=True,
        )

    @property
    def kept(self) -> int | None:
        """Tokens at the end of a prompt that a renderer keeps; None for all."""
        return self.max_tokens if self.too_long == "truncate" else None

    def fitting(self, task: Task, split: Split, renderer: Renderer, most: int = 500) -> Sequence[Example]:
        """The examples of a split whose prompts fit. Says how many do not, or raises UserError that names the first.

        Where the context is the limit it looks at the first `most` only, unless it drops them; the engine refuses the rest when
        it meets them.
        """
        examples = task.examples(split)
        if self.too_long == "truncate":
            return examples
        fits, longest = [], 0
        every = self.too_long == "drop" or not self.by_context
        for i in range(len(examples) if every else min(len(examples), most)):
            length = prompt_tokens(task, examples[i], renderer)
            longest = max(longest, length)
            if length <= self.max_tokens:
                fits.append(i)
            elif self.too_long == "refuse":
                raise UserError(
                    f"the prompt of {split} example {i + 1} has {length} tokens, and {self.why}: lower max_tokens, take another "
                    "model, or set prompt_limit.too_long to drop or truncate"
                )
        if self.too_long == "refuse" or len(fits) == len(examples):
            return examples
        if not fits:
            raise UserError(
                f"prompt_limit.max_tokens={self.max_tokens} removes all {len(examples)} examples of the split {split!r}; the "
                f"longest has {longest} tokens"
            )
        log.info("%s: %d of %d prompts are longer than %d tokens and left out", split, len(examples) - len(fits), len(examples),
                 self.max_tokens)  # fmt: skip
        return picked(examples, fits)
