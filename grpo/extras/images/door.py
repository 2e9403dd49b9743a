"""Opens the eyes of a model, and teaches its renderer to take pictures: what `model.eyes` names."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers import AutoTokenizer

from grpo.env.chat_template import TemplateRenderer
from grpo.extras.images.eyes import noise, with_eyes
from grpo.extras.images.of_vllm import with_pictures
from grpo.extras.images.preflight import CHECKS
from grpo.extras.images.renderer import SeeingRenderer
from grpo.extras.images.sight import PICTURES, Sight
from grpo.extras.images.thumbnails import KeepsPictures, keep
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Group


class OpenSight(Sight):
    """A sight that a model, a renderer and an engine get."""

    def opened(self, model: nn.Module, learns: bool) -> nn.Module:
        """Let a model see, in place. learns: whether tower and projector are trained too."""
        return with_eyes(model, self, learns)

    def lent(self, engine: Any) -> None:
        """Let an engine of vLLM take pictures, in place."""
        with_pictures(engine, self)

    def teach(self, renderer: TemplateRenderer) -> None:
        """Let a renderer take pictures, in place."""
        if not isinstance(renderer, SeeingRenderer):
            renderer.__class__ = type(type(renderer).__name__, (SeeingRenderer, type(renderer)), {})

    def keep(self, folder: Path, groups: Sequence[Group]) -> None:
        """Keep small copies of the pictures of samples in a run's folder."""
        keep(folder, groups)

    def taught(self, callback: Any) -> Any:
        """Return a callback; `Samples` keeps pictures from now on."""
        from grpo.training.callbacks.samples import Samples

        if isinstance(callback, Samples) and not isinstance(callback, KeepsPictures):
            callback.__class__ = type(type(callback).__name__, (KeepsPictures, type(callback)), {})
        return callback

    @property
    def checks(self) -> Mapping[str, Callable[[Any], Any]]:
        """The checks that the preflight of a policy that sees has more, by name."""
        return CHECKS

    def unlike(self, other: Self) -> str:
        """Describe how another processor counts a picture's tokens otherwise; nothing if they agree."""
        for width, height in ((64, 40), (640, 480)):
            picture = noise(0, (width, height))
            if (ours := self.ids(picture)) != (theirs := other.ids(picture)):
                return f"a picture of {width} x {height} pixels has {len(theirs)} tokens there, and {len(ours)} here"
        return ""


SIGHTS: dict[tuple[Any, ...], OpenSight] = {}


def sight_of(pretrained: Pretrained) -> OpenSight:
    """Return the sight of a model, one for each folder and its settings."""
    base = pretrained.base() or pretrained
    saved = Path(pretrained.path, PICTURES)  # beside an adapter, by its run
    own = json.loads(saved.read_text()) if base is not pretrained and saved.is_file() else {}
    settings = {**own, **(pretrained.pictures or {})}
    settings.pop("image_processor_type", None)
    key = (base.path, base.revision, str(settings))
    if key not in SIGHTS:
        tokenizer = AutoTokenizer.from_pretrained(base.path, revision=base.revision)
        SIGHTS[key] = OpenSight(base.path, tokenizer, base.revision, settings)
    return SIGHTS[key]
