"""The limit of prompt lengths, what happens to longer prompts, and the longest sequence of a run."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from grpo.data.rows import picked, spread
from grpo.engines.protocol import Sampling
from grpo.env.intake import build, close_env, first_state, state_of
from grpo.env.rendering import Renderer
from grpo.env.types import Example, SingleTurn, Split, State, Task
from grpo.rollout.types import Limits
from grpo.system.calls import awaited
from grpo.system.deadline import deadline
from grpo.system.errors import UserError
from grpo.system.output.words import plural
from grpo.system.ranges import Count, enforced

log = logging.getLogger(__name__)

START = 600.0  # seconds for one environment to start; a rollout gives it step_timeout
READ = 20_000  # rows of a split that `most_tokens` reads: a third of a millisecond each, or a little more


class Played(Protocol):
    """A `Plan` or an `Evaluator`: how long answers and episodes may be."""

    sampling: Sampling
    limits: Limits


def question_of(task: Task, example: Example) -> State | None:
    """Return the state with which the example's episode begins if its environment is a plain question, the same for every seed,
    with one answer; else None. Raises what the environment raises."""
    envs = [build(task, example, seed, seed) for seed in (0, 1)]
    try:
        plain = all(isinstance(env, SingleTurn) for env in envs) and envs[0].messages == envs[1].messages
        return state_of(awaited(envs[0].start())) if plain else None
    finally:
        for env in envs:
            awaited(close_env(env))


def longest_question(task: Task, examples: Sequence[Example], renderer: Renderer) -> int | None:
    """Return the tokens of the longest prompt; None if an episode is more than a plain question. An environment that fails plays
    no episode."""
    longest = 0
    for example in examples:
        try:
            state = question_of(task, example)
        except UserError:
            raise
        except Exception:
            continue
        if state is None:
            return None
        longest = max(longest, len(renderer.prompt_ids(state.messages, state.tools)))
    return longest


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
        room = context - answer
        if room < 1:
            raise UserError(f"max_tokens={answer} leaves no room for a prompt in the context of {context}: lower it")
        if self.max_tokens is not None and self.max_tokens <= room:
            return replace(self, why=f"prompt_limit.max_tokens={self.max_tokens}", context=context)
        why = f"max_tokens={answer} leaves {room} of the model's context of {context}"
        return replace(self, max_tokens=room, why=why, by_context=True, context=context)

    @property
    def kept(self) -> int | None:
        """The number of tokens that a renderer keeps at the end of a prompt; None: all."""
        return self.max_tokens if self.too_long == "truncate" else None

    def longest(self, task: Task, examples: Sequence[Example], renderer: Renderer, looks: int = 100) -> int:
        """Return the tokens of the longest prompt among at most `looks` examples, or `task.looks`, spread evenly; the limit if
        there are none."""
        seen = spread(examples, getattr(task, "looks", looks))
        return max((prompt_tokens(task, example, renderer) for example in seen), default=self.max_tokens)

    def most_tokens(
        self,
        sources: Mapping[str, tuple[Task, Split]],
        examples: Mapping[str, Sequence[Example]],
        renderer: Renderer,
        played: Sequence[Played],
    ) -> int | None:
        """Return the tokens of the longest prompt and answer together, so that an engine need not make room for the whole
        context. None: only the context bounds them.

        sources: the task of each name. examples: by name; a name without any stands for samples of a source. played: the plan
        and the evaluator. An episode with several turns has a bound if its prompts are truncated, or if max_turns=1 and
        prompt_limit.max_tokens are set. It reads READ examples of a name at most, spread evenly, and allows for twice the
        longest prompt of these.
        """
        if not all(map(len, examples.values())):
            return None
        answer = max(one.sampling.max_tokens for one in played)
        given = self.kept is not None or (all(one.limits.max_turns == 1 for one in played) and not self.by_context)
        longest = self.max_tokens if given else 0
        for name, rows in {} if given else examples.items():
            task, seen = sources[name][0], spread(rows, READ)
            if hasattr(task, "looks") or (most := longest_question(task, seen, renderer)) is None:
                return None
            longest = max(longest, most if len(seen) == len(rows) else 2 * most)
        return longest + answer if longest + answer < (self.context or math.inf) else None

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
                raise UserError(f"{line}: lower max_tokens, or set prompt_limit.too_long to drop or truncate")
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
