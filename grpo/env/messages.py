"""The chat protocol: messages with pictures, tools and calls of them. Knows nothing of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, Protocol, Self, get_args

from grpo.env.pictures import MARK, UNSEEN, Picture, given_in, is_picture, picture_from
from grpo.env.thoughts import FIELDS, parted, with_thought
from grpo.system.errors import UserError

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the policy sees it. parameters: the JSON schema of the object of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class ToolCall:
    """The policy's call of a tool. id: the one that it wrote, if any; it takes no part in comparisons."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)

    def as_dict(self) -> dict[str, Any]:
        called = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        return called | ({"id": self.id} if self.id else {})


@dataclass(frozen=True)
class Message:
    """content: the text; in the policy's messages, everything but well-formed calls. name: in a tool's
    message, the tool.

    error: in the policy's message, why a call could not be read (its text is then in the content); in a
    tool's message, why the call failed. The policy does not see it. given: the beginning of the content that
    stands in the prompt, which is a thought that the prompt leaves open. pictures: those of the user or of a
    tool, in order; the content has an <image> in the place of each.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    error: str | None = None
    given: str = field(default="", compare=False)
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        if self.pictures and (found := self.content.count(MARK)) != len(self.pictures):
            raise ValueError(
                f"a message has {len(self.pictures)} pictures and {found} {MARK} in its text: write one for each"
            )

    @property
    def sampled(self) -> str:
        """The content without the part that stands in the prompt."""
        return self.content.removeprefix(self.given)

    def before(self, stop: Sequence[str]) -> tuple[Self, str | None]:
        """Return the message before the first stop text that was sampled, and that text; the same and None if
        there is none."""
        text, word = cut(self.sampled, stop)
        return (self, None) if word is None else (replace(self, content=self.given + text), word)

    @property
    def reasoning_content(self) -> str | None:
        """The thought that the policy's message begins with, without its tags; None without one. The content
        holds it too."""
        thought = parted(self.content)[0] if self.role == "assistant" else None
        return None if thought is None else thought.strip()

    def as_dict(self) -> dict[str, Any]:
        """The form that chat templates take."""
        named = {"name": self.name} if self.name is not None else {}
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": self.role, "content": self.parts() if self.pictures else self.content, **named, **calls}

    def parts(self) -> list[dict[str, str]]:
        """The texts and pictures of the content in order, as chat templates take them. A picture has its name only."""
        texts, found = self.content.split(MARK), []
        for text, picture in zip_longest(texts, self.pictures):
            found += [{"type": "text", "text": text}] if text else []
            found += [{"type": "image", "image": picture.name}] if picture else []
        return found


def in_a_text(content: str | Sequence[Mapping[str, str]]) -> str:
    """Return the content of `Message.as_dict` as a text that names its pictures."""
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(f"[picture {part['image']}]" if "image" in part else part["text"] for part in parts)


class MessageLike(Protocol):
    """A message of any class, which `message_of` converts. A `Message` also has tool_calls, name and
    error."""

    @property
    def role(self) -> str:
        """`system`, `user`, `assistant` or `tool`."""

    @property
    def content(self) -> str:
        """The text."""


def shown(value: Any, most: int = 80) -> str:
    """Shortens a value for an error message."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return a text before the first stop text in it, and that stop text; the whole text and None if it has
    none."""
    places = [(text.index(word), word) for word in stop if word in text]
    place, word = min(places, default=(len(text), None), key=lambda match: match[0])
    return text[:place], word


def message_of(message: Any) -> Message:
    """Converts a `Message`, an object with role and content, or a dict as chat templates take it. Surrogates
    that UTF-8 cannot encode are replaced. Raises TypeError for anything else."""

    def part(name: str, default: Any = None) -> Any:
        return message.get(name, default) if isinstance(message, Mapping) else getattr(message, name, default)

    role, content, pictures = part("role"), part("content"), tuple(map(picture_from, part("pictures") or ()))
    if isinstance(content, (list, tuple)):
        content, pictures = content_of(content, pictures)
    calls = tuple(map(call_of, part("tool_calls") or ()))
    thought = next((part(field) for field in FIELDS if isinstance(part(field), str)), None)
    if content is None and (calls or thought is not None):
        content = ""
    if role not in get_args(Role) or not isinstance(content, str):
        roles = ", ".join(get_args(Role))
        raise TypeError(f"{shown(message)} is no message: it needs a role ({roles}) and a text as content")
    if role == "assistant" and thought and parted(content)[0] is None:  # it came in a field of its own
        content = with_thought(thought, content)
    more = part("name"), part("error"), getattr(message, "given", "")
    if pictures and role == "assistant":
        raise TypeError("a policy's message has a picture: it writes text only")
    return Message(role, content.encode(errors="replace").decode(), calls, *more, pictures)


def content_of(parts: Sequence[Any], pictures: Sequence[Picture] = ()) -> tuple[str, tuple[Picture, ...]]:
    """Return the text of a content in parts, with an <image> for each picture, and the pictures. pictures: those for parts that
    have none of their own. Raises TypeError for other parts."""
    left, texts, found = iter(pictures), [], []
    for part in parts:
        if is_picture(part):
            if (given := given_in(part)) is None and (given := next(left, None)) is None:
                raise TypeError(f"{shown(part)} has no picture, and there are {len(pictures)} beside the message")
            texts.append(MARK)
            found.append(picture_from(given))
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise TypeError(f"{shown(part)} is no part of a message: parts have the type text or image")
    return "".join(texts), (*found, *left)


def pictures_of(messages: Sequence[Message] | str) -> list[Picture]:
    """Return the pictures of a conversation, in order."""
    return [] if isinstance(messages, str) else [picture for message in messages for picture in message.pictures]


def unseen(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a policy that reads text only, to which a tool's picture is a word. Raises UserError for others."""
    if any(message.pictures for message in messages if message.role != "tool"):
        raise UserError(
            "a message has a picture, and the model reads text only: set model.vision=frozen, with a model that sees"
        )
    return [replace(m, content=m.content.replace(MARK, UNSEEN), pictures=()) if m.pictures else m for m in messages]


def call_of(call: Any) -> ToolCall:
    """Converts a call of a tool. Raises TypeError for anything else."""
    try:
        if not isinstance(call, ToolCall):
            call = ToolCall(call["function"]["name"], call["function"]["arguments"], call.get("id") or "")
    except (TypeError, LookupError, AttributeError):
        raise TypeError(f"{shown(call)} is no call of a tool: see ToolCall.as_dict") from None
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        raise TypeError(f"{shown(call)}: a call has a text as name, and an object (no JSON text) of arguments")
    return call


def tool_of(tool: Any) -> ToolSpec:
    """Converts the description of a tool. Raises TypeError for anything else."""
    if isinstance(tool, ToolSpec):
        return tool
    try:
        described = tool["function"]
        name, parameters = described["name"], described.get("parameters") or {}
        return ToolSpec(str(name), str(described.get("description") or ""), dict(parameters))
    except (TypeError, LookupError, AttributeError, ValueError):
        raise TypeError(f"{shown(tool)} describes no tool: see ToolSpec.as_dict, or tools.spec_of") from None
