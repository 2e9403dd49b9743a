"""A renderer that reads the policy's calls of tools: the form of a model's calls is found by trying what its template writes."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

from grpo.env.chat_dicts import ASKED, as_dicts, called
from grpo.env.chat_template import TemplateRenderer, encoded
from grpo.env.messages import Message, ToolCall, ToolSpec, shown
from grpo.env.rendering import Renderer, continued_ids, message_after, message_read, rendered_prompt
from grpo.env.thoughts import Tags
from grpo.extras.tools.response_templates import form_described, tags_described, template_of
from grpo.extras.tools.tool_forms import FORMS, Form, message_of_text
from grpo.system.errors import UserError
from grpo.system.ranges import enforced

__all__ = [  # with the names that the module grpo.env.renderer had, which this was
    "FormName", "Renderer", "TokenizerRenderer", "continued_ids", "encoded", "message_after", "message_read",
    "rendered_prompt",
]  # fmt: skip
FormName = Literal[  # of tool_forms.FORMS
    "auto", "hermes", "llama3", "mistral", "granite", "glm", "gemma4", "functiongemma", "lfm2", "olmo3", "deepseek", "seed",
    "minimax", "kimi", "deepseek32", "deepseek4", "command", "command_r", "apertus", "nemotron2", "hunyuan", "hy3", "longcat",
    "phi4", "pythonic", "harmony",
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
KINDS_TRIED = {
    name: {"type": kind, "description": "A value."}
    for name, kind in (("text", "string"), ("k", "integer"), ("deep", "boolean"))
}
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
        form = self._forms[self.form if tools else "harmony"]
        message = message_of_text(text, form, tools)
        if tools and len(message.tool_calls) > 1 and not self._several:
            reason = f"{len(message.tool_calls)} calls in one message, and there can be one"
            message = Message("assistant", text, error=f"{reason}; a call is written {form.written}")
        return message

    def _unread(self, tools: Sequence[ToolSpec]) -> set[int]:
        return super()._unread(tools) - (self._marks if tools or self._channels else set())

    @cached_property
    def _marks(self) -> set[int]:
        """The special tokens that mark a call, which are a part of the message."""
        return self._ids_of(self._forms["harmony" if self._channels else self.form].marks)

    @cached_property
    def _forms(self) -> dict[str, Form]:
        """The forms that are known, and that which the tokenizer itself describes."""
        template = template_of(self.tokenizer)
        own = form_described(template) if template else None
        return FORMS | ({"its own": own} if own else {})

    @cached_property
    def _thoughts(self) -> Tags:
        known, template = super()._thoughts, template_of(self.tokenizer)
        return (tags_described(template) if template and known == Tags() else None) or known

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
        told = self._text(ASKED, [FIND])
        try:
            hidden = self._text(ASKED) == told
        except UserError:  # some templates know no conversation without tools
            hidden = False
        if hidden:
            raise UserError(f"this task has tools, and the chat template does not show them: {advice}")
        self._text([*ASKED, *called(1)], [FIND])
        form, _ = self._calling
        if form is None:
            wrote = shown(self._decoded(self._call_of({})), 120)
            raise UserError(f"the chat template writes a call as {wrote}, which no form here reads: {advice}")
        return form

    @cached_property
    def _calling(self) -> tuple[str | None, Mapping[str, bool]]:
        """The form of calls, None without one, and how the template takes them: what it writes must be read as the same call. The
        form that the template asks for in words goes first, since its history may spell calls in another way."""
        template, found, shown_in = str(self.tokenizer.chat_template), None, []
        asked = next((name for name, form in FORMS.items() if form.asked and form.asked in template), None)
        for how in HOW:
            try:
                ids = self._call_of(how)
            except UserError:
                continue
            names = self._forms if self.tool_calls == "auto" else [self.tool_calls]
            if found := next((name for name in names if self._reads(ids, self._forms[name])), None):
                break
            shown_in += [how] if TRIED.name in self._decoded(ids) else []
        else:
            how = shown_in[0] if shown_in else {}
        if self.tool_calls != "auto":
            return self.tool_calls, how
        return (asked if found or shown_in else None) or found, how

    def _reads(self, ids: Sequence[int], form: Form) -> bool:
        """Whether a form reads the call that the template writes."""
        end = self._special - self._ids_of(form.marks)
        turn = takewhile(lambda i: i not in end, dropwhile(lambda i: i in end, ids))
        return message_of_text(self._decoded([*turn]), form, [FIND]).tool_calls == (TRIED,)

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
            return bool(self._text([*ASKED, *called(2)], [FIND]))
        except UserError:
            return False
