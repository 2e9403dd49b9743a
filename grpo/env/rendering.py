"""Messages <-> tokens: the one seam between the two worlds. A Renderer is the slot; rollouts ask it by these
functions."""

from collections.abc import Sequence
from typing import Any, Protocol

from grpo.env.intake import asked_for, no_tokens
from grpo.env.messages import Message, MessageLike, ToolSpec, message_of
from grpo.env.tokens import Turn
from grpo.env.types import State, Step
from grpo.system.errors import UserError


class Renderer(Protocol):
    """Converts between messages and token ids."""

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), before: Sequence[int] = ()
    ) -> Sequence[int]:
        """The conversation as the policy reads it, up to where its next words begin. A renderer for programs
        that send raw prompts takes a text too, as it is.

        before: the prompt and completion ids of an earlier turn. The result begins with these very ids
        wherever the conversation, as text, begins with their text: what was sampled is never tokenized again.
        Else (a template that strips thinking from history, a call spelled differently, an environment that
        rewrites history) all is rendered anew.
        """

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> MessageLike:
        """The policy's message; with tools, also its calls of them. A `parse` with a parameter `before` gets
        the ids of the prompt, after which the message may begin inside a thought."""


def rendered_prompt(renderer: Renderer, state: State, steps: Sequence[Step], turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the prompt of a state, as tokens. It begins with the very ids of the last turn, or else of the
    latest turn whose conversation it continues (a branch, a sub-agent), if their text is the same.

    steps, turns: the episode so far, as messages and as tokens. Raises UserError for a prompt that cannot be
    rendered.
    """
    if isinstance(state.prompt, tuple):
        size = len(getattr(renderer, "tokenizer", range(1 << 31)))
        if not state.prompt or no_tokens(state.prompt, size):
            raise UserError(f"a prompt of token ids has at least one, each from 0 to {size - 1}")
        return state.prompt
    content: Any = state.messages if state.prompt is None else state.prompt
    last = turns[-1].ids if turns else ()
    prompt = tuple(renderer.prompt_ids(content, state.tools, last))
    if prompt[: len(last)] != last and (before := continued_ids(state, steps[:-1], turns)):
        prompt = tuple(renderer.prompt_ids(content, state.tools, before))
    if not prompt:
        raise UserError("a prompt has no tokens: give at least one")
    return prompt


def continued_ids(state: State, steps: Sequence[Step], turns: Sequence[Turn]) -> tuple[int, ...]:
    """Return the ids of the latest of these turns whose conversation the state continues; none if there is no
    such turn."""
    for step, turn in reversed([*zip(steps, turns, strict=False)]):
        conversation = (*step.state.messages, step.action.message)
        if state.messages[: len(conversation)] == conversation:
            return turn.ids
    return ()


def message_read(renderer: Renderer, ids: Sequence[int], state: State, before: Sequence[int]) -> Message:
    """Return the policy's message in a state, cut before the first of the state's stop texts. before: the ids
    of the prompt."""
    return message_after(renderer, ids, before, state.tools).before(state.stop)[0]


def message_after(
    renderer: Renderer, ids: Sequence[int], before: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
) -> Message:
    """Return the policy's message after a prompt of these ids. It begins with the thought that they leave
    open."""
    return message_of(renderer.parse(ids, tools, **asked_for(renderer.parse, before=before)))
