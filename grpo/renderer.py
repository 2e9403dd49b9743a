"""Layer 1 - messages <-> tokens: the one seam between the two worlds."""

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from grpo.messages import Message


class Renderer(Protocol):
    def prompt_ids(self, messages: Sequence[Message], tools=(), before=()) -> tuple[int, ...]:
        """The conversation as the policy reads it, up to where its next words begin."""
        ...

    def parse(self, ids: Sequence[int], tools=()) -> Message:
        """What the policy said."""
        ...


class TokenizerRenderer:
    """Renders with the tokenizer's own chat template; a tokenizer without one gets the plain text, as a base model expects.

    A conversation that ends with an assistant message is continued, not answered (a prefill). keep: tokens at the end of a
    prompt that are kept where it is longer; None for all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep: int | None = None) -> None:
        self.tokenizer, self.keep = tokenizer, keep

    def prompt_ids(self, messages: Sequence[Message], tools=(), before=()) -> tuple[int, ...]:
        ids = self._prompt_ids(messages)
        return ids if self.keep is None else ids[-self.keep :]

    def _prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if self.tokenizer.chat_template is None:
            return tuple(self.tokenizer("\n\n".join(message.content for message in messages)).input_ids)
        prefill = messages[-1].role == "assistant"
        text = self.tokenizer.apply_chat_template(
            [message.as_dict() for message in messages],
            tokenize=False,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
        )
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)  # the template wrote them already

    def parse(self, ids: Sequence[int], tools=()) -> Message:
        return Message("assistant", self.tokenizer.decode(ids, skip_special_tokens=True))
