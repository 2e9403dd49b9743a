"""Opens the eyes of a model, and teaches its renderer to take pictures: what `model.eyes` names."""

from typing import Any

from torch import nn
from transformers import AutoTokenizer

from grpo.env.chat_template import TemplateRenderer
from grpo.extras.images.eyes import with_eyes
from grpo.extras.images.renderer import SeeingRenderer
from grpo.extras.images.sight import Sight
from grpo.models.pretrained import Pretrained


class OpenSight(Sight):
    """A sight that a model and a renderer get."""

    def opened(self, model: nn.Module, learns: bool) -> nn.Module:
        """Let a model see, in place. learns: whether tower and projector are trained too."""
        return with_eyes(model, self, learns)

    def teach(self, renderer: TemplateRenderer) -> None:
        """Let a renderer take pictures, in place."""
        if not isinstance(renderer, SeeingRenderer):
            renderer.__class__ = type(type(renderer).__name__, (SeeingRenderer, type(renderer)), {})


SIGHTS: dict[tuple[Any, ...], OpenSight] = {}


def sight_of(pretrained: Pretrained) -> OpenSight:
    """Return the sight of a model, one for each folder and its settings."""
    base = pretrained.base() or pretrained
    key = (base.path, base.revision, str(pretrained.pictures))
    if key not in SIGHTS:
        tokenizer = AutoTokenizer.from_pretrained(base.path, revision=base.revision)
        SIGHTS[key] = OpenSight(base.path, tokenizer, base.revision, pretrained.pictures)
    return SIGHTS[key]
