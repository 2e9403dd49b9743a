"""The tiny model that sees, before it has learned."""

import pytest
import torch
from PIL import Image

from grpo.env.pictures import picture_from
from grpo.extras.demo.demo_model import SHIPPED
from grpo.extras.demo.demo_seeing import seeing_folder
from grpo.extras.images.door import sight_of
from grpo.models.pretrained import Pretrained
from tasks.shapes import SIDE, guesses


@torch.no_grad()
def told_apart(folder: str) -> float:
    """Return how far the feature of a bright quarter differs between the four quarters, as a share of its size."""
    pretrained = Pretrained(folder, vision="trained", eyes=sight_of)
    eyes, pictures, half = pretrained.model().get_decoder().eyes, [], SIDE // 2
    for quarter in range(4):
        image = Image.new("RGB", (SIDE, SIDE), (40, 40, 40))
        y, x = divmod(quarter, 2)
        image.paste((240, 220, 40), (half * x, half * y, half * (x + 1), half * (y + 1)))
        pictures.append(picture_from(image))
    found = eyes.features([picture.id for picture in pictures], torch.device("cpu"))
    bright = torch.stack([found[picture.id][0][quarter].float() for quarter, picture in enumerate(pictures)])
    return float((bright - bright.mean(0)).std() / bright.std())


@pytest.mark.slow
def test_positions_of_patches_are_seen_if_they_are_large_enough(tmp_path):
    """A feature of the model that ships says hardly where it is: colors are learned from it, places with patience only."""
    shipped = told_apart(str(SHIPPED / "shapes"))
    large = told_apart(seeing_folder(guesses, steps=1, places=2.0, anew=str(tmp_path / "large")))
    assert shipped < 0.01 and large == pytest.approx(0.35, abs=0.15)
