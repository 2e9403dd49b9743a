"""A renderer that reads the policy's calls of tools: the form of a model's calls is found by trying what its template writes."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

from grpo.env.chat_dicts import ADD, ASKED, as_dicts, called
from grpo.env.chat_template import TemplateRenderer, encoded
from grpo.env.messages import Message, ToolCall, ToolSpec, shown
from grpo.env.rendering import Renderer, continued_ids, message_after, message_read, rendered_prompt
from grpo.extras.tools.tool_forms import FORMS, message_of_text
from grpo.system.errors import UserError
from grpo.system.ranges import enforced

__all__ = [  # with the names that the module grpo.env.renderer had, which this was
    "FormName", "Renderer", "TokenizerRenderer", "continued_ids", "encoded", "message_after", "message_read",
    "rendered_prompt",
]  # fmt: skip
FormName = Literal[  # of tool_forms.FORMS
    "auto", "hermes", "llama3", "mistral", "granite", "glm", "gemma4", "lfm2", "olmo3", "deepseek", "seed", "minimax",
    "kimi", "harmony",
]  # fmt: skip
# ways in which templates take calls. text: arguments as JSON text. empty: no content beside a call. named: ids as Kimi's
HOW: tuple[Mapping[str, bool], ...] = (
    {},
    {"text": True},
    {"empty": True},
    {"text": True, "empty": True},
    {"named": True},
)
# a call and a tool with which a template is tried
TRIED = ToolCall("find", {"text": 'a "b"\nc', "k": 2, "deep": True})
KINDS_TRIED = {"text": {"type": "string"}, "k": {"type": "integer"}, "deep": {"type": "boolean"}}
FIND = ToolSpec("find", "Find.", {"type": "object", "properties": KINDS_TRIED})


class TokenizerRenderer(TemplateRenderer):
    """Renders as `TemplateRenderer`, and reads the calls of the policy. tool_calls: the form in which it writes them (see
    `tool_forms`); auto is the one that reads what the template writes."""

    @enforced("renderer")
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        keep: int | None = None,
        tool_calls: FormName = "auto",
        template_args: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        self.tool_calls = tool_calls
        super().__init__(tokenizer, keep, template_args, date)

    def with_args(self, template_args: Mapping[str, Any]) -> Self:
        twin = super().with_args(template_args)
        twin.tool_calls = self.tool_calls
        return twin

    def _message(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        if not tools and not self._channels:
            return super()._message(text, tools)
        message = message_of_text(text, self.form if tools else "harmony", tools)
        if tools and len(message.tool_calls) > 1 and not self._several:
            reason = f"{len(message.tool_calls)} calls in one message, and there can be one"
            message = Message("assistant", text, error=f"{reason}; a call is written {FORMS[self.form].written}")
        return message

    def _unread(self, tools: Sequence[ToolSpec]) -> set[int]:
        return super()._unread(tools) - (self._marks if tools or self._channels else set())

    @cached_property
    def _marks(self) -> set[int]:
        """The special tokens that mark a call, which are a part of the message."""
        return self._ids_of(FORMS["harmony" if self._channels else self.form].marks)

    @property
    def _how(self) -> Mapping[str, bool]:
        return self._calling[1]

    def check_calls(self) -> None:
        _ = self.form

    @cached_property
    def form(self) -> str:
        """How the policy writes calls. Raises UserError if the chat template shows no tools, or not their answers."""
        advice = "take a chat model whose template knows tools, or set model.chat_template=FILE"
        if self.tokenizer.chat_template is None:
            raise UserError(f"this task has tools, and the tokenizer has no chat template to show them in: {advice}")
        if self._text(ASKED, [ADD]) == self._text(ASKED):
            raise UserError(f"this task has tools, and the chat template does not show them: {advice}")
        self._text([*ASKED, *called(1)], [ADD])
        form, _ = self._calling
        if form is None:
            wrote = shown(self._decoded(self._call_of({})), 120)
            raise UserError(f"the chat template writes a call as {wrote}, which no form here reads: {advice}")
        return form

    @cached_property
    def _calling(self) -> tuple[str | None, Mapping[str, bool]]:
        """The form of calls, None without one, and how the template takes them: what it writes must be read as the same call."""
        for how in HOW:
            try:
                ids = self._call_of(how)
            except UserError:
                continue
            for form in FORMS if self.tool_calls == "auto" else [self.tool_calls]:
                end = self._special - self._ids_of(FORMS[form].marks)
                text = self._decoded(ids[: next((k for k, i in enumerate(ids) if i in end), len(ids))])
                if message_of_text(text, form, [FIND]).tool_calls == (TRIED,):
                    return form, how
        return (None if self.tool_calls == "auto" else self.tool_calls), {}

    def _call_of(self, how: Mapping[str, bool]) -> tuple[int, ...]:
        """Return what the template writes after a question for a call and its answer."""
        talk = [*ASKED, Message("assistant", "", (TRIED,)), Message("tool", "3", name=TRIED.name)]
        whole = self._encoded(self._written(as_dicts(talk, None, how), [FIND]))
        question = self._encoded(self._written(as_dicts(ASKED), [FIND]))
        pairs = enumerate(zip(whole, question, strict=False))
        start = next((i for i, (token, before) in pairs if token != before), len(question))
        return whole[start:]

    @cached_property
    def _several(self) -> bool:
        """Whether a message may have several calls: the template of Llama 3.1 raises at two."""
        try:
            return bool(self._text([*ASKED, *called(2)], [ADD]))
        except UserError:
            return False
