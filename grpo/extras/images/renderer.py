"""Prompts with pictures: the template writes one placeholder for each, and each becomes the tokens of its picture."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message, ToolSpec, pictures_of
from grpo.env.pictures import MARK, UNSEEN
from grpo.system.errors import UserError


class SeeingRenderer(TemplateRenderer):
    """A renderer whose messages may have pictures. Inside it a prompt has one placeholder for each picture, so that it is
    compared and continued as text; outside it has all their places."""

    def prompt_ids(
        self, messages: Sequence[Message] | str, tools: Sequence[ToolSpec] = (), before: Sequence[int] = ()
    ) -> tuple[int, ...]:
        sight, pictures = self.tokenizer.sight, pictures_of(messages)
        if pictures and self.keep is not None:
            raise UserError(
                "prompts with pictures cannot be cut to their last tokens: set prompt_limit.too_long to refuse or drop"
            )
        return sight.expanded(super().prompt_ids(messages, tools, sight.folded(before)[0]), pictures)

    def texts(self, messages: Sequence[Message] | str, tools: Sequence[ToolSpec] = ()) -> Iterator[tuple[str, bool]]:
        if not isinstance(messages, str):
            messages = [self._quoted(message) if message.role == "tool" else message for message in messages]
        if pictures_of(messages) and self.tokenizer.chat_template is None:  # it writes the texts as they are
            shown = self.tokenizer.sight.text
            messages = [
                replace(m, content=m.content.replace(MARK, shown), pictures=()) if m.pictures else m for m in messages
            ]
        return super().texts(messages, tools)

    def _quoted(self, message: Message) -> Message:
        """Return a tool's message whose text has none of the model's tokens of pictures, as a page that it has read may."""
        words = message.content.split(MARK) if message.pictures else [message.content]
        for token in self.tokenizer.sight.spellings:
            words = [text.replace(token, UNSEEN) for text in words]
        return replace(message, content=MARK.join(words))

    def _decoded(self, ids: Sequence[int]) -> str:
        return super()._decoded(self.tokenizer.sight.folded(ids)[0])

    @property
    def way_out(self) -> str:
        """The words of errors that say how prompts with pictures get shorter."""
        return f"; fewer tokens a picture: model.pictures={self.tokenizer.sight.fewer}"
