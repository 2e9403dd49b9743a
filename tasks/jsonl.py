"""Any file or dataset with a column of prompts, and any reward: a task that needs no code."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import getmembers, isawaitable, isfunction
from pathlib import Path
from typing import Any, Literal

from grpo.data.rows import at
from grpo.env import thoughts
from grpo.env.messages import Message, shown
from grpo.env.types import Env, Example, Reward, Split, State
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.datasets.pictures import RowPictures, marked
from grpo.extras.tools.conversations import chat_message, messages_of, text_in
from grpo.extras.tools.env import ToolEnv, text_and_pictures
from grpo.extras.tools.tool_parsers import Malformed
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions, imported
from grpo.rewards.row_task import RowTask
from grpo.system.errors import UserError
from grpo.system.ranges import FunctionName

log = logging.getLogger(__name__)

# of a message in a file
FIELDS = {field.name for field in fields(Message)} - {"error", "pictures"} | {"tool_call_id", *thoughts.FIELDS}


def conversation(prompt: Any, asked: Callable[[Any], Any] = lambda messages: messages) -> tuple[Message, ...]:
    """Return the messages of a list in OpenAI's form: role, content (a text, or parts of type text or image), reasoning_content,
    name, tool_calls (arguments as an object or as JSON text), tool_call_id. asked: gives them their pictures (see `RowPictures`).
    Raises UserError for what a `Message` cannot hold."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    if not listed or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise UserError(f"{shown(prompt)} is neither a text nor a list of messages with role and content")
    for message in prompt:
        if other := [name for name, value in message.items() if value is not None and name not in FIELDS]:
            raise UserError(f"a message has the field {other[0]!r}, which no chat template gets: leave it out")
        if not isinstance(content := message.get("content"), str | list | None):
            fix = "it needs a text, or a list of parts of type text or image"
            raise UserError(f"a message has the content {shown(content)}: {fix}")
    try:
        return messages_of([chat_message(message) for message in asked(prompt)])
    except UserError:
        raise
    except (Malformed, TypeError, LookupError, AttributeError, ValueError) as error:
        reason = f"a call or a part needs {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{reason}, in {shown(prompt)}") from error


def tools_of(name: str) -> Sequence[Callable]:
    """Return the tools of a server (mcp:COMMAND), or the function with this name. Raises UserError if it is not there."""
    if name.startswith("mcp:"):
        from grpo.extras.tools.mcp import mcp_tools

        return mcp_tools(name.removeprefix("mcp:"))
    return [imported(name, "task.tools")]


class Jsonl(RowTask):
    """prompt: the column with the prompt, a text or a list of messages (see `conversation`). gold: the column with the right
    answer, for rewards that need `gold`. Both may be dotted names of fields in a column. images: the one with pictures, see
    `RowPictures`.
    last_answer: whether the policy continues an assistant's message at the end of a prompt, or that is left out. template: the
    text around a prompt that is a text, with {prompt} where the prompt goes. system: the message before the prompt. tools: what
    the policy may call, FILE.py:NAME or a dotted path of a function, or mcp:COMMAND. environment: see `FactoryEnv`. rows: further
    arguments of `Dataset`.
    """

    def __init__(
        self,
        path: str,
        rewards: Functions,
        weights: Weights = None,
        solved: float = 1.0,
        prompt: str = "prompt",
        gold: str | None = None,
        images: str | None = "auto",
        template: str = "{prompt}",
        system: str | None = None,
        tools: str | Sequence[str] = (),
        environment: FunctionName | None = None,
        last_answer: Literal["continue", "drop"] = "continue",
        **rows: Any,
    ) -> None:
        if "{prompt}" not in template:
            raise UserError(f"task.template={template!r} must say {{prompt}} where the prompt goes")
        if isinstance(environment, str):
            environment = imported(environment, "task.environment")
        if tools and environment:
            raise UserError("task.tools and task.environment, whose methods are tools, exclude each other: set one")
        self.environment = environment
        self.tools = [tool for name in ([tools] if isinstance(tools, str) else tools) for tool in tools_of(name)]
        self.prompt, self.gold_column, self.template, self.system = prompt, gold, template, system
        self.last_answer = last_answer
        self.logged = False  # whether the log has a line about prompts that are texts
        columns = (prompt,) if gold is None else (prompt, gold)
        folder = Path(path).expanduser()
        self.pictures = RowPictures(images, folder if folder.is_dir() else folder.parent)
        self.looked: set[Split] = set()  # splits whose pictures have been looked at
        data = Dataset(path, columns, form=self.posed, pictures=self.pictures, **rows)
        super().__init__(data, rewards, weights, solved)

    def columns(self, example: Example) -> Example:
        """Return the columns, with the prompt also as `prompt`, which shows whether this is a conversation."""
        prompt = at(example, self.prompt)
        if not isinstance(prompt, str):
            prompt = [
                {**message, "content": text_in(marked(message)[0].get("content")) or ""} for message in prompt or ()
            ]
        return super().columns({**example, "prompt": prompt})

    def examples(self, split: Split) -> Sequence[Example]:
        rows = super().examples(split)
        if split == "train" and not self.logged and isinstance(at(rows[0], self.prompt), str):
            self.logged = True
            form = "a user's message, in the chat template if there is one"
            bare = "with model.chat_template=none it is sent alone, as TRL does"
            log.info("task.prompt=%s is a text: %s; %s", self.prompt, form, bare)
        has = self.pictures.name(rows[0]) is not None or not isinstance(at(rows[0], self.prompt), str)
        if has and split not in self.looked:
            self.looked.add(split)
            self.pictures.look(rows, self.looked_at)
        return rows

    @property
    def several_turns(self) -> bool:
        return bool(self.environment or self.tools)

    def build(self, example: Example) -> Env:
        if self.tools:
            return ToolEnv(self.messages(example), self.tools)
        if self.environment is None:
            return super().build(example)
        return FactoryEnv(self.messages(example), self.environment(), example, self.rewards.solved)

    def messages(self, example: Example) -> tuple[Message, ...]:
        try:
            return self.posed(at(example, self.prompt), example)
        except UserError as error:
            raise UserError(f"task.prompt={self.prompt}: {error}") from error

    def posed(self, prompt: Any, row: Example | None = None) -> tuple[Message, ...]:
        """Return the messages of a prompt, with the pictures of its row if that is given. Raises UserError if it has no form that
        can be sent."""
        before = (Message("system", self.system),) if self.system else ()
        messages = conversation(self.listed(prompt), partial(self.pictures.asked, row=row, read=self.pictures.read))
        if self.last_answer == "drop" and len(messages) > 1 and messages[-1].role == "assistant":
            messages = messages[:-1]
        return (*before, *messages)

    def listed(self, prompt: Any) -> Any:
        """Return a prompt that is a text as a list of one message."""
        text = isinstance(prompt, str)
        return [{"role": "user", "content": self.template.replace("{prompt}", prompt)}] if text else prompt

    def looked_at(self, example: Example, look: Callable[[Any], Any]) -> None:
        """Look at the pictures of a row."""
        self.pictures.asked(self.listed(at(example, self.prompt)), example, look)


class FactoryEnv(ToolEnv):
    """An environment in the form of TRL's `environment_factory`: its public methods are the tools, what `reset(**row)` returns,
    a text or pictures too, is added to the prompt, and `get_reward()`, if there is one, gives the reward named `environment`.
    All other attributes are the inner environment's: reward functions with an argument `environments` read them."""

    def __init__(self, messages: Sequence[Message], inner: Any, row: Mapping[str, Any], solved: float) -> None:
        names = {name for name, _ in getmembers(type(inner), isfunction) if name[0] != "_"}
        tools = sorted(names - {"reset", "get_reward", "close"})
        super().__init__(messages, [getattr(inner, name) for name in tools])
        self.inner, self.row, self.solved = inner, row, solved

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:
            return super().__getattribute__(name)
        return getattr(self.__dict__["inner"], name)

    def start(self) -> State:
        if (more := self.inner.reset(**self.row)) is not None:
            *before, last = self.messages
            text, pictures = text_and_pictures(more)
            self.messages = (*before, replace(last, content=last.content + text, pictures=(*last.pictures, *pictures)))
        return super().start()

    async def outcome(self) -> Reward | None:
        value = self.inner.get_reward() if hasattr(self.inner, "get_reward") else None
        if isawaitable(value):
            value = await value
        return None if value is None else Reward(float(value), value >= self.solved)
