"""How long prompts may be."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo.data.dataset import picked
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Split, Task, build, state_of
from grpo.system.calls import awaited
from grpo.system.errors import UserError, check_least, oneof

log = logging.getLogger(__name__)


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
        oneof("prompt_limit.too_long", self.too_long, ("refuse", "drop", "truncate"))
        check_least("prompt_limit.max_tokens", self.max_tokens, 1)

    def within(self, context: int, answer: int) -> "PromptLimit":
        """The same with a number, for a model with `context` tokens of which an answer may take `answer`."""
        room = context - answer
        if room < 1:
            raise UserError(
                f"max_tokens={answer} leaves no room for a prompt in the model's context of {context}: lower it"
            )
        if self.max_tokens is not None and self.max_tokens <= room:
            return replace(self, why=f"prompt_limit.max_tokens={self.max_tokens}")
        why = f"max_tokens={answer} leaves {room} of the model's context of {context}"
        return replace(self, max_tokens=room, why=why, by_context=True)

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
        refuse, lengths = self.too_long == "refuse", []
        for i in range(min(len(examples), most) if refuse and self.by_context else len(examples)):
            lengths.append(prompt_tokens(task, examples[i], renderer))
            if refuse and lengths[i] > self.max_tokens:
                raise UserError(
                    f"the prompt of {split} example {i + 1} has {lengths[i]} tokens, and {self.why}: lower max_tokens, take "
                    "another model, or set prompt_limit.too_long to drop or truncate"
                )
        fits = [i for i, length in enumerate(lengths) if length <= self.max_tokens]
        if refuse or len(fits) == len(examples):
            return examples
        if not fits:
            raise UserError(
                f"prompt_limit.max_tokens={self.max_tokens} removes all {len(examples)} examples of the split {split!r}; the "
                f"longest has {max(lengths)} tokens"
            )
        longer = len(examples) - len(fits)
        log.info(
            "%s: %d of %d prompts are longer than %d tokens and left out", split, longer, len(examples), self.max_tokens
        )
        return picked(examples, fits)
