"""Tools: Python functions that the policy may call, and the environment in which it does. No tokens.

A tool is a function whose docstring the policy reads:

    def search(query: str) -> str:
        \"\"\"Search the encyclopedia.

        Args:
            query: what to look for
        \"\"\"

    ToolEnv([Message("user", question)], [search])
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from grpo.env.messages import Message, ToolCall, ToolSpec, shown
from grpo.env.pictures import MARK, UNSEEN, Picture, is_picture
from grpo.env.types import Action, State
from grpo.extras.images.files import picture_in
from grpo.system.calls import awaited
from grpo.system.errors import UserError, plural
from grpo.system.files import strict_json

TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


class ToolError(Exception):
    """Raised by a tool for a call that makes no sense. The policy reads the message, as it does for any error but an OSError."""


def spec_of(function: Callable) -> ToolSpec:
    """Describes a tool to the policy, by its `spec` if it has one, else from the types of its signature and its docstring
    (Google's style, with Args). Raises UserError where one of them is missing."""
    if isinstance(spec := getattr(function, "spec", None), ToolSpec):
        return spec
    try:
        described = get_json_schema(function)["function"]
    except Exception as error:  # transformers has a type of its own for each thing that can be missing
        name = getattr(function, "__name__", function)
        fix = "give every parameter a type and a line under Args: in the docstring"
        raise UserError(f"the tool {name!r} cannot be described: {error}; {fix}") from error
    return ToolSpec(described["name"], described["description"], described["parameters"])


def check_arguments(spec: ToolSpec, arguments: Any) -> None:
    """Raises ToolError where the arguments of a call are not those of the tool."""
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    form = f"{spec.name} takes {', '.join(properties) or 'no arguments'}"
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments must be an object, not {shown(arguments)}; {form}")
    if missing := [name for name in spec.parameters.get("required", ()) if name not in arguments]:
        raise ToolError(f"{', '.join(missing)} missing; {form}")
    if unknown := [name for name in arguments if name not in properties]:
        raise ToolError(f"there is no argument {', '.join(map(repr, unknown))}; {form}")
    for name, value in arguments.items():
        wanted = properties[name].get("type")
        if not isinstance(wanted, str) or (value is None and properties[name].get("nullable")):
            continue
        if not isinstance(value, TYPES.get(wanted, object)) or (isinstance(value, bool) and wanted != "boolean"):
            raise ToolError(f"{name} must be of type {wanted}, not {shown(value)}")


def text_and_pictures(result: Any) -> tuple[str, tuple[Picture, ...]]:
    """Return the text of a result, with an <image> for each picture in it, and the pictures: images of PIL or `Picture`s, alone,
    in a list with texts, or in parts of the types text and image. Raises UserError for a picture that cannot be read."""
    parts = list(result) if isinstance(result, list | tuple) else [result]
    if not any(is_picture(part) or is_image(part) for part in parts):
        return result if isinstance(result, str) else strict_json(result, ensure_ascii=False, default=str), ()
    texts, pictures = [], []
    for part in parts:
        if is_image(part) or is_picture(part):
            texts.append(MARK)
            pictures.append(picture_in(part))
        else:
            words = part.get("text") if isinstance(part, Mapping) else part
            words = words if isinstance(words, str) else strict_json(part, ensure_ascii=False, default=str)
            texts.append(words.replace(MARK, UNSEEN))  # the word is no picture's place
    return "\n".join(texts), tuple(pictures)


def is_image(value: Any) -> bool:
    """Return whether a value is a picture or an image of PIL."""
    return isinstance(value, Picture) or (hasattr(value, "save") and hasattr(value, "getpixel"))


class ToolEnv:
    """A question, and tools that help to answer it: a message without a call is the answer.

    tools: functions, plain or coroutines, that return text, what JSON can tell, or pictures (see `text_and_pictures`); one that
    is made for this episode alone may keep a state. A call that cannot be read, names no tool, or fails is answered by a message
    with the reason, and `error`. Only an OSError (no connection, a timeout, a missing file) is not the policy's fault: it ends
    the episode without a reward.
    max_calls: the most calls answered in one message. max_chars: the length at which an answer is cut.
    """

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Callable], max_calls: int = 8, max_chars: int = 8000
    ) -> None:
        self.messages = tuple(messages)
        self.functions = {tool.__name__: tool for tool in tools}
        self.specs = {name: spec_of(tool) for name, tool in self.functions.items()}
        self.max_calls, self.max_chars = max_calls, max_chars

    def start(self) -> State:
        return State(self.messages, tuple(self.specs.values()))

    def step(self, action: Action) -> State | None:
        message = action.message
        if action.truncated or not (message.tool_calls or message.error):
            return None
        if message.error:  # not a tool's message: some templates show one only after a call that they can read
            replies = [Message("user", f"Error: that call could not be read: {message.error}")]
        else:
            replies = [self.answer(call, place) for place, call in enumerate(message.tool_calls)]
        self.messages = (*self.messages, message, *replies)
        return State(self.messages, tuple(self.specs.values()))

    def answer(self, call: ToolCall, place: int = 0) -> Message:
        """Runs a call and returns the tool's message. place: the index of the call in its message."""
        try:
            if place >= self.max_calls:
                raise ToolError(f"no more than {plural(self.max_calls, 'call')} in one message")
            if call.name not in self.specs:
                raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(self.specs)}")
            check_arguments(self.specs[call.name], call.arguments)
            text, pictures = text_and_pictures(awaited(self.functions[call.name](**call.arguments)))
        except OSError:
            raise
        except Exception as error:
            name = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            return Message("tool", self.cut(f"Error: {name}{error}"), name=call.name, error=str(error) or name)
        text = self.cut(text)
        return Message("tool", text, name=call.name, pictures=pictures[: text.count(MARK)])

    def cut(self, text: str) -> str:
        """Shortens an answer to max_chars."""
        if len(text) <= self.max_chars:
            return text
        return f"{text[: self.max_chars]}... (cut: {len(text):,} characters)"
