"""A decoder that sees: it takes prompts with the ids of pictures, and computes with their features in these places.

The class of the decoder changes in place, as its parameters stay. So every way in which the project calls it (padded rows, packed
rows with shared prompts, the caches of the built-in engine) sees, and none of them knows.

Shapes: T tokens, n places of pictures among them, D the width of embeddings.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from grpo.env.pictures import Picture, picture_of
from grpo.extras.images.sight import MUTUAL, PIXELS, ROTARY, Sight, size_of
from grpo.models.head import States
from grpo.models.packed_attention import PLAN, Packed, Unplanned
from grpo.system.errors import UserError
from grpo.system.memory import sent

NEVER = -1e4  # a logit whose probability is 0, in 16 bits too
# arguments of the whole module that its decoder does not take
OF_PICTURES = (
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "token_type_ids",
    "vision_feature_layer",
    "image_sizes",
    "labels",
    "return_dict",
)


class Eyes:
    """Turns ids of pictures into features and positions. whole: the module of tower, projector and decoder."""

    def __init__(self, whole: nn.Module, sight: Sight) -> None:
        self.whole, self.sight = whole, sight
        self.kind = whole.config.model_type
        self.rotary, self.mutual = self.kind in ROTARY, self.kind in MUTUAL
        # of no user: layouts and caches are tried with two pictures of unequal sizes
        self.probes = [noise(seed, size) for seed, size in enumerate(((40, 64), (64, 32)))]

    def features(self, numbers: Sequence[int], device: torch.device) -> dict[int, tuple[Tensor, ...]]:
        """Return the features of each of these pictures, [places, D], and those that further layers add (deepstack), each once.
        Pictures whose pixels have the same shape go through the tower together."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number in dict.fromkeys(numbers):
            pixels = self.sight.pixels(number)
            alike.setdefault(tuple((name, x.shape[1:]) for name, x in pixels.items()), []).append(number)
        found: dict[int, tuple[Tensor, ...]] = {}
        for members in alike.values():
            pixels = [self.sight.pixels(number) for number in members]
            arguments = {name: sent(torch.cat([one[name] for one in pixels]), device) for name in pixels[0]}
            out = self.whole.get_image_features(**arguments, return_dict=True)
            layers = [as_one(out.pooler_output), *map(as_one, getattr(out, "deepstack_features", None) or ())]
            places = [self.sight.ids(picture_of(number)).count(number) for number in members]
            if sum(places) != len(layers[0]):
                names = ", ".join(picture_of(number).name for number in members)
                raise UserError(
                    f"pictures {names} have {sum(places)} places in prompts, and {len(layers[0])} features of the tower"
                )
            found |= zip(members, zip(*(layer.split(places) for layer in layers), strict=True), strict=True)
        return found

    def embedded(self, ids: Tensor, host: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the embeddings of tokens, with features in the places of pictures, [..., D], and the features that further
        layers add there, [n, D] each. ids: [...] with ids of pictures; host: the same in the host's memory."""
        seen = host < 0
        numbers = host[seen].tolist()
        features = self.features(numbers, ids.device)
        # the places of a picture come in order, and start anew where a sequence has it again
        met = dict.fromkeys(numbers, 0)
        order: list[tuple[int, int]] = []
        for number in numbers:
            order.append((number, met[number] % len(features[number][0])))
            met[number] += 1
        if cut := [number for number, places in met.items() if places % len(features[number][0])]:
            name, places, whole = picture_of(cut[0]).name, met[cut[0]], len(features[cut[0]][0])
            raise UserError(
                f"picture {name} has {places} places in rows, and {whole} features: rows with parts of pictures"
            )
        begin, table = 0, {}
        for number, (first, *_) in features.items():
            table[number], begin = begin, begin + len(first)
        index = sent(torch.tensor([table[number] + place for number, place in order]), ids.device)
        layers = [torch.cat(parts).index_select(0, index) for parts in zip(*features.values(), strict=True)]
        words = self.whole.get_input_embeddings()(ids.clamp(min=0))
        places = sent(seen, ids.device)[..., None]
        return words.masked_scatter(places, layers[0].to(words.dtype)), layers[1:]

    def positions(self, ids: Sequence[int]) -> Tensor:
        """Return the positions of a sequence, [3, T], in the host's memory."""
        line = torch.tensor(ids)
        seen = (line < 0).int()
        if not seen.any():
            return torch.arange(len(ids)).expand(3, -1)
        grids, left = [], 0
        for number in line[line < 0].tolist():
            if left == 0:
                left = self.sight.ids(picture_of(number)).count(number)
                grids.append(self.sight.pixels(number)["image_grid_thw"])
            left -= 1
        found, _ = self.whole.get_rope_index(line[None], mm_token_type_ids=seen[None], image_grid_thw=torch.cat(grids))
        return found[:, 0]

    def of_padded(self, host: Tensor, mask: Tensor) -> Tensor:
        """Return the positions of padded rows, [3, B, T], in the host's memory. host, mask: [B, T]."""
        found = torch.zeros(3, *host.shape, dtype=torch.int64)
        for row, (ids, real) in enumerate(zip(host, mask.bool(), strict=True)):
            found[:, row, real] = self.positions(ids[real].tolist())
        return found

    def of_packed(self, plan: Packed, host: Tensor) -> Tensor:
        """Return the positions of a packed row, [3, 1, T], in the host's memory. A row goes on after its prompt. host: [T]."""
        ids, count = host.tolist(), len(plan.prompt_lengths)
        found = torch.zeros(3, 1, len(ids), dtype=torch.int64)
        prompts: list[tuple[list[int], int]] = []  # ids, and the position after them
        for start, length in zip(plan.starts[:count], plan.prompt_lengths.tolist(), strict=True):
            prompt = ids[start : start + length]
            own = self.positions(prompt)
            found[:, 0, start : start + length] = own
            prompts.append((prompt, int(own.max()) + 1))
        for start, length, owner in zip(
            plan.starts[count:], plan.row_lengths.tolist(), plan.owner.tolist(), strict=True
        ):
            row, (prompt, after) = ids[start : start + length], prompts[owner]
            own = (
                after + torch.arange(length)
                if min(row, default=0) >= 0
                else self.positions(prompt + row)[:, len(prompt) :]
            )
            found[:, 0, start : start + length] = own
        return found


class Sees:
    """A decoder with `eyes`. Its forward takes ids of pictures."""

    eyes: Eyes

    @property
    def probe_ids(self) -> list[tuple[int, ...]]:
        """The tokens of two pictures, with which layouts and caches are tried."""
        return [self.eyes.sight.ids(picture) for picture in self.eyes.probes]

    def position_after(self, prompt: Sequence[int]) -> int:
        """Return the position of the token after a prompt."""
        return int(self.eyes.positions(prompt).max()) + 1 if self.eyes.rotary else len(prompt)

    def imagined(self, length: int, count: int) -> list[list[int]]:
        """Return prompts for a forecast, each of pictures of its own, like those of the fullest prompt so far, and of further
        tokens up to this length."""
        sight, prompts = self.eyes.sight, []
        for i in range(count):
            copies = [sight.copy(picture.id, i) for picture in sight.fullest]
            ids = [
                j for picture in copies for j in (i, *sight.ids(picture))
            ]  # a word between them, as in every template
            prompts.append([*(ids if len(ids) <= length else ()), *[i] * (length - len(ids))])
        return prompts

    def pixel_bytes(self, prompts: int) -> int:
        """Return the bytes of the host's memory that pixels of so many prompts like the fullest one so far take beside those that
        are there."""
        sight = self.eyes.sight
        own = sum(size_of(sight.pixels(picture.id)) for picture in sight.fullest)
        return max(0, min(PIXELS, prompts * own) - sight.bytes)

    def _deepstack_process(self, hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
        """Add features of deeper layers, as Qwen3-VL's own code does, which waits for the device to count the places. hidden:
        [..., D]; places: of them, [n]; features: [n, D]."""
        return hidden.flatten(0, -2).index_add(0, places, features.to(hidden)).view_as(hidden)

    def forward(self, input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        plan, past = PLAN.get(), kwargs.get("past_key_values")
        steps = plan is not None and not isinstance(plan, Packed)  # of an engine, whose tokens are words
        if input_ids is None or steps or (past is not None and past.get_seq_length()):
            return super().forward(input_ids, *args, **kwargs)
        host = (plan.host if isinstance(plan, Packed) else input_ids).cpu().view(input_ids.shape)
        if int(host.min()) >= 0:
            return self.with_tower(super().forward(input_ids, *args, **kwargs))
        eyes, mask = self.eyes, kwargs.get("attention_mask")
        embeddings, further = eyes.embedded(input_ids, host)
        if further:
            places = sent((host.flatten() < 0).nonzero()[:, 0], input_ids.device)
            kwargs |= {"visual_pos_masks": places, "deepstack_visual_embeds": further}
        if eyes.rotary:
            real = torch.ones_like(host) if mask is None else mask.cpu()
            found = eyes.of_packed(plan, host[0]) if plan is not None else eyes.of_padded(host, real)
            kwargs["position_ids"] = sent(found, input_ids.device)
        if eyes.mutual:
            if plan is not None:
                raise Unplanned("tokens of a picture see each other")
            kwargs["attention_mask"] = self.mutual_masks(embeddings, host, **kwargs)
        return super().forward(None, *args, inputs_embeds=embeddings, **kwargs)

    def with_tower(self, out: Any) -> Any:
        """Return what a pass without pictures gives, to which each weight of the tower adds 0: ranks that learn together wait for
        a gradient of each, and others of them may have pictures."""
        text = {id(p) for p in self.parameters()}
        tower = [p for p in self.eyes.whole.parameters() if p.requires_grad and id(p) not in text]
        if tower and torch.is_grad_enabled():
            out.last_hidden_state = out.last_hidden_state + 0 * torch.stack([p.flatten()[0] for p in tower]).sum()
        return out

    def mutual_masks(self, embeddings: Tensor, host: Tensor, **given: Any) -> Mapping[str, Tensor]:
        """Return the masks of Gemma 3, where a token of a picture sees the whole picture."""
        from transformers.models.gemma3.modeling_gemma3 import (
            create_masks_for_vision_model,
            get_block_sequence_ids_for_mask,
        )

        blocks = get_block_sequence_ids_for_mask((host < 0).int(), device=embeddings.device)
        known = {name: given.get(name) for name in ("attention_mask", "past_key_values", "position_ids")}
        return create_masks_for_vision_model(self.config, embeddings, block_sequence_ids=blocks, **known)


class Whole:
    """The module of tower, projector and decoder. It leaves ids to the decoder, which sees."""

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any) -> States:
        if inputs_embeds is not None or kwargs.get("pixel_values") is not None:
            return super().forward(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        of_text = {name: value for name, value in kwargs.items() if value is not None and name not in OF_PICTURES}
        out = self.get_decoder()(input_ids=input_ids, **of_text)
        return States(last_hidden_state=out.last_hidden_state, past_key_values=out.past_key_values)


class Head:
    """A head that gives the tokens of pictures no probability. banned: their ids; a policy that could sample one would write a
    picture that is none."""

    banned: Tensor

    def limited(self, logits: Tensor) -> Tensor:
        """Return the logits, [..., V], with those of banned tokens so low that their probability is 0."""
        return logits.index_fill(-1, self.banned.to(logits.device), NEVER)

    def forward(self, states: Tensor) -> Tensor:
        return self.limited(super().forward(states))


def with_eyes(model: nn.Module, sight: Sight, learns: bool) -> nn.Module:
    """Let a model see, in place. learns: whether tower and projector are trained too."""
    whole, decoder, head = model.base_model, model.get_decoder(), model.get_output_embeddings()
    vars(decoder)["eyes"] = Eyes(whole, sight)
    vars(head)["banned"] = torch.tensor(sight.banned, device="cpu")
    for part, kind in ((decoder, Sees), (whole, Whole), (head, Head)):
        if not isinstance(part, kind):
            part.__class__ = type(type(part).__name__, (kind, type(part)), {})
    vars(model)["vision_learns"] = learns
    return model


def as_one(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the features of several pictures as one tensor, [n, D]."""
    several = features if isinstance(features, (list, tuple)) else [features]
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in several])


def noise(seed: int, size: tuple[int, int]) -> Picture:
    """Return a picture of noise, width x height."""
    from PIL import Image

    numbers = torch.randint(
        256, (size[1], size[0], 3), dtype=torch.uint8, device="cpu", generator=torch.Generator().manual_seed(seed)
    )
    file = BytesIO()
    Image.frombytes("RGB", size, bytes(numbers.flatten().tolist())).save(file, "PNG")
    return Picture(file.getvalue())
