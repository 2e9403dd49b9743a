"""Renders with a tokenizer's own chat template, and finds out by trying how it writes thoughts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from grpo.env import thoughts
from grpo.env.chat_dicts import ADD, ASKED, as_dicts, called
from grpo.env.messages import Message, ToolSpec, pictures_of, unseen
from grpo.env.thoughts import CLOSED, OPENED, WAYS, Manner, Tags, Written, left_open, parted
from grpo.system.errors import UserError, one_line

ENOUGH = "It is three."  # an answer with which a template is tried


class TemplateRenderer:
    """Renders with the tokenizer's own chat template; a tokenizer without one gets the plain text, as a base
    model expects.

    A conversation that ends with an assistant message is continued, not answered (a prefill). keep: a longer
    prompt keeps this many tokens, those at its end; None: all. template_args: further variables of the
    template, as enable_thinking. date: the day for templates that write the date, as 2026-01-31; None for
    today's. It reads no calls of tools: subclasses do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        keep: int | None = None,
        template_args: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        self.tokenizer, self.keep, self.date = tokenizer, keep, date
        self.template_args = dict(template_args or {})
        try:
            day = date and datetime.fromisoformat(date)
        except ValueError:
            raise UserError(f"renderer.date={date} is no day: write it as 2026-01-31, or null for today's") from None
        self._day = {"strftime_now": day.strftime} if day else {}
        if sight := getattr(tokenizer, "sight", None):
            sight.teach(self)
        if tokenizer.chat_template is not None:
            self._check_template()

    def with_args(self, template_args: Mapping[str, Any]) -> Self:
        """Return a renderer with further variables of the template. Raises UserError for names that are not
        variables."""
        if taken := template_args.keys() & signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise UserError(f"chat_template_kwargs has {', '.join(sorted(taken))}: give variables of the template")
        merged = self.template_args | dict(template_args)
        return type(self)(self.tokenizer, self.keep, template_args=merged, date=self.date)

    def check_calls(self) -> None:
        """Raises UserError if the policy cannot be shown tools, or its calls of them cannot be read."""
        raise UserError("this task has tools, and this renderer reads no calls of them: set renderer=default")

    def _check_template(self) -> None:
        """Raises UserError if two questions become the same tokens. A template that refuses a lone question
        is not tried."""
        try:
            first, second = (
                self._encoded(self._text([Message("user", q)])) for q in ("How many are 1 + 2?", "A bird?")
            )
        except UserError:
            return
        if first == second:
            same = f"different prompts become the same {len(first)} tokens"
            raise UserError(f"the chat template ignores its messages, {same}: set model.chat_template=FILE, or none")

    def prompt_ids(
        self, messages: Sequence[Message] | str, tools: Sequence[ToolSpec] = (), before: Sequence[int] = ()
    ) -> tuple[int, ...]:
        if tools:
            self.check_calls()  # refused before anything is rendered
        if not isinstance(messages, str) and pictures_of(messages) and not hasattr(self.tokenizer, "sight"):
            messages = unseen(messages)
        every = (self._encoded(text, special) for text, special in self.texts(messages, tools))
        fresh = ids = next(every)
        if before := tuple(before):
            longer = (self._extended(before, version) for version in chain([fresh], every))
            ids = next((version for version in longer if version[: len(before)] == before), fresh)
        return ids if self.keep is None or len(ids) <= self.keep else fresh[-self.keep :]

    def texts(self, messages: Sequence[Message] | str, tools: Sequence[ToolSpec] = ()) -> Iterator[tuple[str, bool]]:
        """Yield (text of a prompt, whether the tokenizer adds special tokens to it) for every way in which
        the template takes thoughts, the best first. A template writes special tokens itself."""
        if isinstance(messages, str):
            yield messages, True
        elif self.tokenizer.chat_template is None:
            yield "\n\n".join(message.content for message in messages), True
        else:
            tried: list[list[Written]] = []
            for way in self._ways:
                if (written := self._dicts(messages, way)) not in tried:
                    tried.append(written)
                    yield self._written(written, tools), False

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), before: Sequence[int] | None = None) -> Message:
        """Return the policy's message. before: the ids of its prompt; None: a prompt ends as the template
        ends one."""
        given = left_open(self._begun) if before is None else self._left_open(before)
        dropped = self._unread(tools)
        text = given + self._thoughts.said(self._decoded([i for i in ids if i not in dropped]))
        return replace(self._message(text, tools), given=given)

    def _message(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return the policy's message that a text is."""
        return Message("assistant", text)

    def _unread(self, tools: Sequence[ToolSpec]) -> set[int]:
        """The special tokens that are no part of a message."""
        return self._special - self._tags

    def _left_open(self, prompt: Sequence[int]) -> str:
        """Return the thought that a prompt leaves open, with its tag: in the policy's turn, where the
        template marks it, or at its very end; nothing if none is."""
        text, mark = self._thoughts.read(self._decoded(prompt)), self._begun.partition(OPENED)[0]
        known = (mark and mark in text) or text.rstrip().endswith(OPENED)
        return left_open(text.rpartition(mark)[2] if mark else text) if known else ""

    @cached_property
    def _begun(self) -> str:
        """The beginning of the policy's turn, as the template writes it after a question; empty if it refuses
        a lone question."""
        try:
            asked, question = (self._written(as_dicts(ASKED), ask=ask) for ask in (True, False))
        except UserError:
            return ""
        return self._thoughts.read(asked.removeprefix(question)) if asked.startswith(question) else ""

    def answer_ids(self, message: Message) -> tuple[int, ...]:
        """Return a message of the policy as it would sample it: what the template writes after a prompt, up
        to the token that ends a message. Without a template, that is the text and the end of a sequence.
        Where prompts leave a thought open, it continues with the message's thought, or closes an empty one;
        where they close it, the message's thought is left out."""
        text = message.content if self.tokenizer.chat_template is None else self._after_prompt(message)
        ids, end = self._encoded(text.rstrip()), self.tokenizer.eos_token_id
        ids = ids[: ids.index(end) + 1] if end in ids else ids  # behind it a template may begin the next message
        return ids if end is None or (ids and ids[-1] in self._special) else (*ids, end)

    def _after_prompt(self, message: Message) -> str:
        """Return a message of the policy as the template writes it after a prompt."""
        _, tag, inside = self._begun.partition(OPENED)
        thought, rest = parted(message.content)
        if thought is not None and (self._channels or CLOSED in inside):
            kept = "" if CLOSED in inside else f"{OPENED}{thought.strip()}{CLOSED}"
            message = replace(message, content=kept + rest.lstrip("\n"))
        asked, whole = self._thoughts.read(self._text(ASKED)), self._answered(message)
        if whole.startswith(head := asked[: len(asked) - len(tag + inside)]):
            turn = whole.removeprefix(head)
        else:  # the template begins the policy's messages in another way than prompts end
            turn = message.content + self._answered(Message("assistant", ENOUGH)).rpartition(ENOUGH)[2]
        rest = turn.removeprefix(tag + inside)
        if tag and rest != turn and (CLOSED not in rest or rest.startswith(OPENED)):
            # the template opens a thought in front of a last message, too
            turn, thought = parted(rest)[1].lstrip(), thought and f"{thought.strip()}\n"
        own, after = parted(turn)
        if CLOSED in inside:
            turn = after.removeprefix(inside.partition(CLOSED)[2])
        elif not self._channels and (tag or (own is None and thought is not None)):
            if own is None:  # the template writes no thought in the history
                gap = "\n\n" if self._thoughts == Tags() and not turn[:1].isspace() else ""
                own, after = thought or "\n\n", gap + turn
            turn = (own.removeprefix(inside) if tag else OPENED + own) + CLOSED + after
        return self._thoughts.written(turn)

    def _answered(self, message: Message) -> str:
        """Return the conversation with an answer to a question, as the template writes it."""
        dicts = self._dicts([*ASKED, message, *ASKED], self._ways[0])[:-1]
        return self._thoughts.read(self._written(dicts, ask=False, closed=True))

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        return self._written(self._dicts(messages), tools)

    def _dicts(self, messages: Sequence[Message], way: Callable[[Written], Written] | None = None) -> list[Written]:
        """The form that the template takes: see `as_dicts`."""
        has_calls = any(message.tool_calls for message in messages)
        return as_dicts(messages, way, self._how if has_calls else None)

    @property
    def _how(self) -> Mapping[str, bool]:
        """How the template takes calls: see `chat_dicts.as_dicts`."""
        return {}

    def _written(
        self, messages: Sequence[Written], tools: Sequence[ToolSpec] = (), ask: bool = True, closed: bool = False
    ) -> str:
        """A conversation as the template writes it. ask: it ends where the policy's next words begin. closed:
        a last message of the policy is over, not continued."""
        prefill = messages[-1]["role"] == "assistant" and not closed
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=[tool.as_dict() for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=ask and not prefill,
                continue_final_message=prefill,
                **self._day,
                **self.template_args,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message["role"] for message in messages[:8]) + ", ..." * (len(messages) > 8)
            reason = f"a conversation of {roles}: {one_line(error)}"
            fix = "ask in another way (task.prompt) or set model.chat_template"
            raise UserError(f"the chat template refuses {reason}; {fix}") from error

    @cached_property
    def _ways(self) -> list[Callable[[Written], Written]]:
        """The ways in which the template writes a thought and what follows it best, found by trying."""
        if self._channels:
            return [partial(thoughts.in_channels, opening="")]
        opening = "".join(self._begun.partition(OPENED)[1:])
        thought, rest = "Let me see.", "It is three."
        block = (left_open(opening) or f"{OPENED}\n") + f"{thought}\n{CLOSED}\n\n"
        talk = [*ASKED, Message("assistant", block + rest), Message("user", "Sure?")]
        call = [*ASKED, Message("assistant", block, called(1)[0].tool_calls), called(1)[1]]

        def odd(
            way: Callable[[Written], Written], messages: list[Message], tools: Sequence[ToolSpec], rest: str
        ) -> int:
            try:
                text = self._written(self._dicts(messages, way), tools, ask=False)
            except UserError:
                return 3
            tags, told = self._thoughts, text.partition(ASKED[0].content)[2]
            return thoughts.oddity(tags.read(told), thought, rest, tags.around)

        ways = [partial(self._passed_on, way=way, opening=opening) for way in WAYS]
        ranks = [odd(way, talk, (), rest) + odd(way, call, [ADD], "") for way in ways]
        return [way for way, rank in zip(ways, ranks, strict=True) if rank == min(ranks)]

    def _passed_on(self, written: Written, way: Manner, opening: str) -> Written:
        """A message of the policy as one of the ways has it, with the model's own tags."""
        if thoughts.unopened(written["content"]):  # as others have read the turn
            written = written | {"content": left_open(opening) + written["content"]}
        written = way(written, opening=opening)
        return written | {"content": self._thoughts.written(written["content"])}

    def _encoded(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        return encoded(self.tokenizer, text, add_special_tokens)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False, spaces_between_special_tokens=False)

    def _extended(self, before: tuple[int, ...], fresh: tuple[int, ...]) -> tuple[int, ...]:
        """`before` and the ids of what follows it in the text of `fresh`; or `fresh`, where this is not the
        same text."""
        # not the template's: a tokenizer may normalize what it reads, as Qwen's does
        text = self._decoded(fresh)
        ids = before + self._encoded(text[len(self._decoded(before)) :])
        return ids if self._decoded(ids) == text else fresh

    @cached_property
    def _special(self) -> set[int]:
        added = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return added | set(self.tokenizer.all_special_ids)

    @cached_property
    def _channels(self) -> bool:
        """Whether the policy writes every message in a channel, as gpt-oss does."""
        return "<|channel|>analysis" in str(self.tokenizer.chat_template)

    @cached_property
    def _thoughts(self) -> Tags:
        """How the policy marks its thoughts."""
        return thoughts.tags_of(str(self.tokenizer.chat_template))

    @cached_property
    def _tags(self) -> set[int]:
        """The special tokens that are tags of thoughts."""
        return self._special & self._ids_of((OPENED, CLOSED, self._thoughts.token, self._thoughts.end))

    def _ids_of(self, tokens: Sequence[str]) -> set[int]:
        """The ids of those tokens that the tokenizer has; it gives the others its id of the unknown."""
        ids = zip(tokens, self.tokenizer.convert_tokens_to_ids([*tokens]), strict=True)
        return {i for token, i in ids if i is not None and self.tokenizer.convert_ids_to_tokens(i) == token}


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return a text's token ids. Raises UserError for a token without a row in the model's embedding
    (`Pretrained.tokenizer`)."""
    text = text.encode(errors="replace").decode()  # programs may send half of a surrogate pair
    ids = tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)
    if strangers := getattr(tokenizer, "without_row", {}).keys() & set(ids):
        token = tokenizer.without_row[min(strangers)]
        raise UserError(f"a prompt has {token!r}, for which the model's embedding has no row: leave it out")
    return ids
