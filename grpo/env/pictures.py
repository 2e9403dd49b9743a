"""Pictures in messages, and the token ids that stand for them.

A picture takes as many places in a prompt as the model makes of it. Each of these places has the same id, a negative number
that only these bytes have. So equal ids are equal pictures: whatever compares, shares, caches or keeps prompts by their ids
needs to know nothing of pictures. grpo/extras/images turns such ids into what the model sees.
"""

from base64 import b64decode
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from grpo.system.errors import UserError

MARK = "<image>"  # the place of a picture in a message's text
UNSEEN = "[image]"  # a tool's picture, to a policy that reads text only
PARTS = ("image", "image_url", "input_image")  # types of a message's parts that are pictures
ALIVE: "WeakValueDictionary[int, Picture]" = WeakValueDictionary()  # by id


class Picture:
    """The bytes of a file, such as PNG or JPEG. There is one object for the same bytes. id: of its tokens, negative. name: the
    first digits of the SHA-256 of its bytes, by which tables and errors name it."""

    data: bytes
    id: int
    name: str

    def __new__(cls, data: bytes) -> Self:
        name = sha256(data).hexdigest()[:16]
        number = -1 - (int(name, 16) >> 1)
        found = ALIVE.get(number)
        if found is None:
            found = super().__new__(cls)
            found.data, found.id, found.name = data, number, name
            ALIVE[number] = found
        return found

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return Picture, (self.data,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Picture({self.name}, {len(self.data)} bytes)"


def picture_of(number: int) -> Picture:
    """Return the picture whose tokens have this id. Raises UserError if no message has it any more."""
    if (found := ALIVE.get(number)) is None:
        raise UserError(
            f"a row has the id {number} of a picture that no message holds: keep the messages with their tokens"
        )
    return found


def is_picture(part: Any) -> bool:
    """Return whether a part of a message is a picture."""
    return isinstance(part, Mapping) and part.get("type") in PARTS


def given_in(value: Any) -> Any:
    """Return what holds a picture: bytes, a text, an image of PIL, or None. value: that, or a mapping with it, as a dataset's
    {"bytes", "path"} or a part of a message."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("bytes"), str):  # of a table where they are a text too
        return value["bytes"].encode()
    names = ("image", "image_url", "bytes", "path", "url")
    return next((found for name in names if (found := given_in(value.get(name))) is not None), None)


def picture_from(value: Any) -> Picture:
    """Return a picture of any form that datasets and programs give: bytes, a file's path, a `data:` URL, {"bytes"} or {"path"} or
    {"url"}, or an image of PIL, which is written as PNG. Raises TypeError for anything else, UserError for a missing file."""
    if isinstance(value, Picture):
        return value
    value = value if (given := given_in(value)) is None else given
    if isinstance(value, (bytes, bytearray)):
        return Picture(bytes(value))
    if hasattr(value, "save"):
        file = BytesIO()
        value.save(file, "PNG")
        return Picture(file.getvalue())
    if not isinstance(value, (str, Path)):
        raise TypeError(f"{type(value).__name__} is no picture: give bytes, a path, a data: URL or an image of PIL")
    if str(value).startswith("data:"):
        return Picture(b64decode(str(value).partition(",")[2]))
    if "://" in str(value):
        raise UserError(f"picture {str(value)[:80]}: nothing is read from a network; give its file or its bytes")
    try:
        return Picture(Path(value).expanduser().read_bytes())
    except OSError as error:
        raise UserError(f"picture {value} cannot be read: {error.strerror}") from error
