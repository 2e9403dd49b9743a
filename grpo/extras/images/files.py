"""Pictures as datasets and tools give them: read, and looked at before a model sees them."""

from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from grpo.env.messages import shown
from grpo.env.pictures import Picture, given_in, picture_from, picture_of
from grpo.system.errors import UserError, one_line

LONG = 1000  # characters that no path has


def placed_in(value: Any, folder: Path | None) -> Any:
    """Return a value with the path of its file, if it is one. folder: where relative paths begin. Raises UserError for a text
    that is none."""
    value = given_in(value)
    if not isinstance(value, str | Path) or str(value).startswith("data:"):
        return value
    text = str(value).removeprefix("file://")
    if len(text) > LONG:
        raise UserError(f"{shown(text, 40)} is no path: write base64 as data:image/png;base64,...")
    return text if "://" in text or folder is None else str(folder / Path(text).expanduser())


def picture_in(value: Any, folder: Path | None = None) -> Picture:
    """Return the picture of a value that a dataset or a tool gives, and look whether it can be read. Raises UserError, in one
    line, for what is none."""
    value = placed_in(value, folder)
    try:
        picture = picture_from(value)
    except UserError:
        raise
    except (TypeError, ValueError, OSError) as error:  # of base64, or an image of PIL that cannot be written
        raise UserError(
            f"a picture cannot be read ({one_line(error)}): give a file, its bytes or a data: URL"
        ) from error
    try:
        check_picture(picture.id)
    except UserError as error:
        raise UserError(f"picture {picture_name(value, picture)} {error}") from error.__cause__
    return picture


@lru_cache(1 << 16)
def check_picture(number: int) -> None:
    """Read all of the picture with this id, once. Raises UserError, without its name, if that fails."""
    read_image(BytesIO(picture_of(number).data), whole=True)


def read_image(file: Any, whole: bool = False) -> None:
    """Open a file of a picture, a path or bytes, or read all of it. Raises UserError, without its name, if that fails."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if whole:
                image.load()
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(f"is larger than {most:,} pixels, the most that PIL reads: make it smaller") from error
    except OSError as error:
        why = error.strerror or one_line(error)
        raise UserError(f"cannot be read ({why}): give a PNG or JPEG file") from error
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"cannot be read ({one_line(error)}): give a PNG or JPEG file") from error


def glanced(value: Any, folder: Path | None = None) -> None:
    """Look at the first bytes of a value's picture, without reading all of it. Raises UserError for a file that is missing or no
    picture."""
    value = placed_in(value, folder)
    if not isinstance(value, str | Path) or "://" in str(value) or str(value).startswith("data:"):
        picture_in(value)
        return
    try:
        read_image(value)
    except UserError as error:
        raise UserError(f"picture {value} {error}") from error.__cause__


def picture_name(value: Any, picture: Picture) -> str:
    """Return how errors name a picture: by its path, or else by the first digits of its SHA-256."""
    is_path = isinstance(value, str | Path) and not str(value).startswith("data:")
    return str(value) if is_path else picture.name
