"""The longest prompt of a run, and its longest sequence, for which an engine makes room."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from grpo.data.rows import spread
from grpo.engines.protocol import Sampling
from grpo.env.intake import build, close_env, state_of
from grpo.env.rendering import Renderer
from grpo.env.types import Example, SingleTurn, Split, State, Task
from grpo.rollout.prompt_limit import PromptLimit, prompt_tokens
from grpo.rollout.types import Limits
from grpo.system.calls import awaited
from grpo.system.errors import UserError

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


def longest_prompt(
    limit: PromptLimit, task: Task, examples: Sequence[Example], renderer: Renderer, looks: int = 100
) -> int:
    """Return the tokens of the longest prompt among at most `looks` examples, or `task.looks`, spread evenly; the limit if
    there are none."""
    seen = spread(examples, getattr(task, "looks", looks))
    return max((prompt_tokens(task, example, renderer) for example in seen), default=limit.max_tokens)


def most_tokens(
    limit: PromptLimit,
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
    given = limit.kept is not None or (all(one.limits.max_turns == 1 for one in played) and not limit.by_context)
    longest = limit.max_tokens if given else 0
    for name, rows in {} if given else examples.items():
        task, seen = sources[name][0], spread(rows, READ)
        if hasattr(task, "looks") or (most := longest_question(task, seen, renderer)) is None:
            return None
        longest = max(longest, most if len(seen) == len(rows) else 2 * most)
    return longest + answer if longest + answer < (limit.context or math.inf) else None
