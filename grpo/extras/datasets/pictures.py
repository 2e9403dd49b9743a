"""Pictures of rows: in a column, in the parts of messages, or where a text says <image>. A row's pictures are read when its
environment is built."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo.data.rows import at, spread
from grpo.env.messages import shown
from grpo.env.pictures import MARK, PARTS, Picture, given_in, is_picture
from grpo.extras.images.files import glanced, picture_in
from grpo.system.errors import UserError, plural

AUTO = ("images", "image")  # columns that are looked for
LOOKS = 1000  # rows of a split whose pictures are looked at when it is read
TEXTS = ("text", "input_text", "output_text")  # types of parts
OTHERS = ("<video>", "<audio>")

Asked = tuple[dict[str, Any], list[Any]]  # a message with its content as a text; for each <image> its picture, or None


class RowPictures:
    """Where the pictures of rows are.

    column: auto for `images` or `image`, where rows have one; None for pictures in the parts of messages only. folder: where
    relative paths begin.
    """

    def __init__(self, column: str | None = "auto", folder: Path | None = None) -> None:
        self.column, self.folder = column, folder

    def name(self, columns: Collection[str]) -> str | None:
        """Return the column with pictures, which the user has named or which is one of these; None without one."""
        return self.column if self.column != "auto" else next((name for name in AUTO if name in columns), None)

    def of(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the values of a row's column, one for each picture."""
        name = self.name(row)
        value = None if name is None else at(row, name)
        values = list(value) if isinstance(value, list | tuple) else [value]
        return [one for one in values if given_in(one) not in (None, "", b"")]

    def question(self, question: Any, row: Mapping[str, Any]) -> Any:
        """Return what a row asks, as a hash of it is taken: the same words about another picture are another question."""
        values = self.of(row)
        return [question, *map(mark_of, values)] if values else question

    def asked(
        self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any] | None, read: Callable[[Any], Any]
    ) -> list[dict]:
        """Return the messages of a row with their pictures, as `chat_message` takes them. The column's pictures go, in order,
        where an <image> or a part of the type image stands, or if there is none before the text of the first user's message.

        row: None to look at the form of messages alone. read: from a value to its picture. Raises UserError for what does not
        fit.
        """
        asked = [marked(message) for message in messages]
        if row is None:
            return [message for message, _ in asked]
        values = [value for _, of_message in asked for value in of_message]
        free, given, name = sum(value is None for value in values), self.of(row), self.name(row)
        if name is not None and (other := next((x for x in OTHERS for m, _ in asked if x in plain_text(m)), None)):
            raise UserError(f"a text has {other}: pictures and texts are read, other media are not")
        if given and not values:
            first = next((i for i, (message, _) in enumerate(asked) if message.get("role") == "user"), None)
            if first is None:
                raise UserError(f"the column {name} has {plural(len(given), 'picture')}, and no message is the user's")
            message = asked[first][0]
            asked[first] = {**message, "content": MARK * len(given) + plain_text(message)}, [None] * len(given)
        elif free != len(given):
            if name is None and not any(is_parted(message) for message in messages):
                return list(messages)  # <image> is a word
            where = f"the column {name}" if name is not None else "no column (task.images names one)"
            count = f"{plural(len(given), 'picture')} in {where}, and {free} {MARK} without one in the messages"
            raise UserError(
                f"{count}: write one for each picture, or none, which puts them before the first user's text"
            )
        left = iter(given)
        found = []
        for message, of_message in asked:
            pictures = [read(next(left) if value is None else value) for value in of_message]
            found.append({**message, "pictures": tuple(pictures)} if pictures else message)
        return found

    def read(self, value: Any) -> Picture:
        """Return the picture of a value."""
        return picture_in(value, self.folder)

    def look(self, rows: Any, pose: Callable[[Mapping[str, Any], Callable[[Any], Any]], Any]) -> None:
        """Look at the pictures of at most LOOKS rows, spread evenly, without reading all of each. pose: makes the messages of a
        row, and is given what reads a picture. Raises UserError that names the first row with a mistake."""
        where = getattr(rows, "where", lambda place: f"row {place + 1}")
        for place in spread(range(len(rows)), LOOKS):
            try:
                pose(rows[place], lambda value: glanced(value, self.folder))
            except UserError as error:
                raise UserError(f"{where(place)}: {error}") from error


def marked(message: Mapping[str, Any]) -> Asked:
    """Return a message with an <image> in its text for each picture in its parts, and what these give. Raises UserError for a
    picture in a message of the policy, and for parts of other media."""
    content, role = message.get("content"), message.get("role")
    kinds = (
        [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else ()
    )
    if other := next((kind for kind in kinds if isinstance(kind, str) and kind not in TEXTS + PARTS), None):
        raise UserError(f"a message has a part of type {shown(other)}: text and image are read, other media are not")
    if not is_parted(message):
        texts = plain_text(message) if role in ("user", "tool") else ""
        return dict(message), [None] * texts.count(MARK)
    if role == "assistant":
        raise UserError("a message of the assistant has a picture: a policy writes text only")
    texts, values = [], []
    for part in content:
        if is_picture(part):
            texts.append(MARK)
            values.append(given_in(part))
        else:
            texts.append(part if isinstance(part, str) else str(part.get("text") or ""))
            values += [None] * texts[-1].count(MARK)
    return {**message, "content": "".join(texts)}, values


def is_parted(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a picture among its parts."""
    return isinstance(message.get("content"), list | tuple) and any(map(is_picture, message["content"]))


def plain_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; if it comes in parts, one line each."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "\n".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return content if isinstance(content, str) else ""


def mark_of(value: Any) -> str:
    """Return what tells a picture of a row from others: its path, or a hash of its bytes."""
    value = given_in(value)
    if isinstance(value, str) and not value.startswith("data:"):
        return value
    return sha256(value if isinstance(value, bytes) else str(value).encode()).hexdigest()


def unread(table: Any) -> Any:
    """Return a table of `datasets` whose pictures stay as they are stored, {"bytes", "path"}."""
    if not table.features or (features := undecoded(table.features)) == table.features:
        return table
    if not hasattr(table, "__len__"):
        return table.cast(features)
    from datasets import Dataset

    # not `cast`, which writes the table anew: the values are stored in the same way
    info = table.info.copy()
    info.features = features
    return Dataset(table.data.cast(features.arrow_schema), info, table.split)


def undecoded(feature: Any) -> Any:
    """Return a type of `datasets`, or a column's or all columns', whose pictures are not decoded."""
    from datasets import Image, LargeList, List

    if isinstance(feature, Image):
        return Image(mode=feature.mode, decode=False)
    if isinstance(feature, List | LargeList):
        return dataclasses.replace(feature, feature=undecoded(feature.feature))
    if isinstance(feature, dict):
        return type(feature)({name: undecoded(one) for name, one in feature.items()})
    return feature
