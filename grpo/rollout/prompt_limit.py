"""The limit of prompt lengths, and what happens to longer prompts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo.data.rows import picked
from grpo.env.intake import first_state
from grpo.env.rendering import Renderer
from grpo.env.types import Example, Split, Task
from grpo.system.errors import UserError, plural
from grpo.system.ranges import Count, enforced
from grpo.system.stopping.signals import deadline

log = logging.getLogger(__name__)

START = 600.0  # seconds for one environment to start; a rollout gives it step_timeout


def prompt_tokens(task: Task, example: Example, renderer: Renderer) -> int:
    """Return the number of tokens of the example's first prompt; 0 if its environment fails, which `play` will report."""
    try:
        with deadline(START, f"the start of an environment of {type(task).__name__}", "give its calls time limits"):
            state = first_state(task, example)
    except UserError:
        raise
    except Exception:
        return 0
    return len(renderer.prompt_ids(state.messages, state.tools))


@enforced("prompt_limit")
@dataclass(frozen=True)
class PromptLimit:
    """The longest prompt, and what happens to longer ones.

    max_tokens: tokens of a prompt at most; None: the model's context minus the tokens of an answer. too_long: "refuse" the run,
    "drop" the example, or "truncate" the prompt from the left, which keeps its end. context: the model's, in tokens.
    """

    max_tokens: Count | None = None
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    why: str = ""  # the limit, in words
    by_context: bool = False  # the context is the limit, which the engine checks too
    context: int | None = None

    def within(self, context: int, answer: int) -> "PromptLimit":
        """Return the limit, with max_tokens set, for a model with this context, of which an answer may take `answer` tokens."""
        left = context - answer
        if left < 1:
            raise UserError(f"max_tokens={answer} leaves no room for a prompt in the context of {context}: lower it")
        if self.max_tokens is not None and self.max_tokens <= left:
            return replace(self, why=f"prompt_limit.max_tokens={self.max_tokens}", context=context)
        why = f"max_tokens={answer} leaves {left} of the model's context of {context}"
        return replace(self, max_tokens=left, why=why, by_context=True, context=context)

    @property
    def kept(self) -> int | None:
        """The number of tokens that a renderer keeps at the end of a prompt; None: all."""
        return self.max_tokens if self.too_long == "truncate" else None

    def fitting(self, task: Task, split: Split, renderer: Renderer, most: int = 500) -> Sequence[Example]:
        """Return the examples of a split whose prompts fit. Logs how many were dropped, or raises UserError with the first one.

        If the context is the limit and nothing is dropped, only the first `most` examples are checked: the engine refuses
        others when it meets them. A task with `looks`, whose environments are slow to start, is not checked here.
        """
        examples = task.examples(split)
        if self.too_long == "truncate" or hasattr(task, "looks"):
            return examples
        refuse, lengths = self.too_long == "refuse", []
        for i in range(min(len(examples), most) if refuse and self.by_context else len(examples)):
            lengths.append(prompt_tokens(task, examples[i], renderer))
            if refuse and lengths[i] > self.max_tokens:
                line = f"the prompt of {split} example {i + 1} has {plural(lengths[i], 'token')}, and {self.why}"
                pictures = getattr(renderer, "way_out", "")
                raise UserError(f"{line}: lower max_tokens, or set prompt_limit.too_long to drop or truncate{pictures}")
        fits = [i for i, length in enumerate(lengths) if length <= self.max_tokens]
        if refuse or len(fits) == len(examples):
            return examples
        if not fits:
            line = (
                f"prompt_limit.max_tokens={self.max_tokens} removes all {plural(len(examples), 'example')} of the split"
            )
            raise UserError(f"{line} {split!r}; the longest has {plural(max(lengths), 'token')}: raise it")
        left_out = f"{len(examples) - len(fits)} of {len(examples)} prompts"
        log.info("%s: %s are longer than %d tokens and left out", split, left_out, self.max_tokens)
        return picked(examples, fits)
