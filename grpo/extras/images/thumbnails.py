"""Small copies of the pictures in a run's tables of samples, beside which a report shows what the model wrote."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from grpo.env.messages import pictures_of
from grpo.env.pictures import Picture
from grpo.rollout.types import Group
from grpo.system.files import replacing, surviving

log = logging.getLogger(__name__)

SIDE = 128  # pixels of the longer side, at most
MOST = 2000  # pictures, as many as a page has samples


class KeepsPictures:
    """Joins the class of `Samples` where the policy sees: its tables come with pictures."""

    folder: Path

    def write(self, kind: str, rollout: int, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        keep(self.folder, groups)
        super().write(kind, rollout, groups, columns)


def keep(folder: Path, groups: Sequence[Group]) -> None:
    """Write FOLDER/pictures/NAME.jpg for each picture in the messages of samples, if it is not there yet. Above MOST files, those
    that no sample has had for the longest time are removed."""
    place = folder / "pictures"
    last = [sample.trajectory.steps[-1] for group in groups for sample in group if sample.trajectory.steps]
    with surviving(str(place)):
        for picture in dict.fromkeys(picture for step in last for picture in pictures_of(step.state.messages)):
            file = place / f"{picture.name}.jpg"
            if file.is_file():
                file.touch()
            else:
                with replacing(file) as new:
                    new.write_bytes(small(picture))
        files = sorted(place.glob("*.jpg"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MOST]:
            say(place)
            file.unlink()


@cache  # once for each folder
def say(place: Path) -> None:
    """Log that older pictures are removed."""
    log.info("%s holds the last %s pictures of samples, small; the report names older ones", place, f"{MOST:,}")


def small(picture: Picture) -> bytes:
    """Return a picture as the model sees it, in RGB, in a JPEG file whose longer side is SIDE at most."""
    from PIL import Image

    file = BytesIO()
    with Image.open(BytesIO(picture.data)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(file, "JPEG", quality=85, subsampling=0)
    return file.getvalue()
