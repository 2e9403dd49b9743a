"""Checks of a run whose policy sees, each a function of the preflight's probe: pictures have the features that prompts have
places for, the policy looks at them, and the engine gets the weights of a tower that learns."""

from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from grpo.env.pictures import Picture, picture_of
from grpo.extras.images.eyes import Eyes, noise
from grpo.models.adapted import without_adapter
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.errors import plural
from grpo.system.loading import kind_of

Verdict = tuple[str, ...]  # the result, the numbers that were compared, and what to do about them
FEW = 3  # rows of a check
NONE = (
    "WARN",
    "no prompt of the first rows has a picture",
    "the policy would learn without: look at the task's columns, or set model.vision=null",
)


def has_features(probe: Any) -> Verdict:
    """Each picture of the first rows has as many features as a prompt has places for it. Raises UserError if not."""
    ids = probe.tokens.ids
    if not (numbers := ids[ids < 0].unique().tolist()):
        return NONE
    eyes = eyes_of(probe)
    with torch.no_grad():
        features = [eyes.features([number], probe.module.device)[number][0] for number in numbers]
    places = sum(map(len, features))
    return "PASS", f"{plural(len(numbers), 'picture')} of {places} places have as many features"


@torch.no_grad()
def looks_at_pictures(probe: Any) -> Verdict:
    """Another picture in the place of each gives other log-probabilities."""
    if (rows := rows_that_see(probe)) is None:
        return NONE
    held = {number: another(picture_of(number)) for number in rows.ids[rows.ids < 0].unique().tolist()}
    sight = probe.tokenizer.sight
    if any(sight.ids(p).count(p.id) != sight.ids(picture_of(n)).count(n) for n, p in held.items()):
        return "SKIP", "pictures of equal sizes have different numbers of tokens"
    ids = rows.ids.clone()
    for number, picture in held.items():
        ids[rows.ids == number] = picture.id
    ours, others = probe.trainer(rows)[0], probe.trainer(replace(rows, ids=ids))[0]
    shift = float((ours - others)[rows.mask].abs().mean())
    text = f"other pictures move log-probabilities by {shift:.1e} nats, bound {probe.bound:.1e}"
    if shift > probe.bound:
        return "PASS", text
    blind = "the policy is blind" if shift == 0 else "the policy hardly looks at its pictures"
    remedy = f"{blind}: look at the weights of its tower and projector, at model.pictures and at the chat template"
    return ("FAIL" if shift == 0 else "WARN"), text, remedy


def tower_is_sent(probe: Any) -> Verdict:
    """New weights of the tower and of what lies between it and the decoder reach the engine, with features that it has kept."""
    if not (chosen := of_tower(probe)):
        return "SKIP", "no weight of the tower learns"
    if (rows := rows_that_see(probe)) is None:
        return NONE
    version = probe.rollouts.plan.num_rollouts + 3  # of no rollout, and of no other check
    result, text = probe.moved(chosen, rows, version)
    remedy = "the engine keeps old weights of the tower, or features of them: set engine=transformers"
    return (result, text, remedy) if result == "FAIL" else (result, text)


CHECKS = {
    "pictures have their features": has_features,
    "the policy looks at pictures": looks_at_pictures,
    "new weights of the tower reach the engine": tower_is_sent,
}


def eyes_of(probe: Any) -> Eyes:
    """Return the eyes of the policy."""
    return without_adapter(probe.module.policy).get_decoder().eyes


def rows_that_see(probe: Any) -> TokenBatch | None:
    """Return the first FEW rows of the episodes that have pictures; None if a device has none."""
    rows = (probe.tokens.ids < 0).any(1).nonzero()[:FEW, 0].cpu()
    return probe.tokens.rows(rows) if all(distributed.all_gather([len(rows) > 0])) else None


def of_tower(probe: Any) -> dict[str, Tensor]:
    """Return a trained weight of each kind outside the decoder and the head."""
    model = without_adapter(probe.module.policy)
    text = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    named = probe.module.policy.named_parameters()
    return {kind_of(name): p for name, p in named if p.requires_grad and id(p) not in text}


def another(picture: Picture) -> Picture:
    """Return noise of a picture's size."""
    from PIL import Image

    file = BytesIO()
    with (
        Image.open(BytesIO(picture.data)) as image,
        Image.open(BytesIO(noise(picture.id % 997, (64, 64)).data)) as other,
    ):
        other.resize(image.size, Image.Resampling.NEAREST).save(file, "PNG")
    return Picture(file.getvalue())
