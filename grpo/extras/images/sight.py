"""Makes of a picture the tokens that stand for it in a prompt, and the pixels that a model's tower reads.

Both come from the processor in the model's own folder, so that a picture is counted once and by one rule.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import cached_file

from grpo.env.pictures import Picture, picture_of
from grpo.models.pretrained import context_of
from grpo.system.errors import UserError, one_line, plural

PIXELS = 1 << 30  # bytes of pixels that are kept in the host's memory
# families whose pictures are tested here. Positions of the second have three dimensions; in the third, tokens of a picture see
# each other
PLAIN, ROTARY, MUTUAL = ("idefics3", "smolvlm", "mistral3"), ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("gemma3",)
ROWS = ("mistral3",)  # with Pixtral's tower
FEWER = {  # settings that make fewer tokens of a picture
    "idefics3": "{size: {longest_edge: 512}}",
    "smolvlm": "{size: {longest_edge: 512}}",
    "mistral3": "{size: {longest_edge: 512}}",
    "gemma3": "{do_pan_and_scan: false}",
    "others": "{max_pixels: 200704}",
}
OF_OTHERS = ("chat_template", "processor_class", "auto_map")  # settings that are no arguments of a processor
PICTURES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
# what a tower reads
READ = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")


@dataclass(frozen=True)
class Seen:
    """A picture as a model sees it. ids: its tokens in a prompt; those with features have the picture's id. pixels: the
    arguments of the model's tower, one picture along the first dimension of each."""

    ids: tuple[int, ...]
    pixels: Mapping[str, Tensor]


class Sight:
    """The processor of a model that sees. path: its folder or hub id. settings: of its image processor, as max_pixels.

    text, placeholder: the token that stands for a picture in the text of a chat template; repeated: the one of its places.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        revision: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.path, self.revision = tokenizer, path, revision
        config = AutoConfig.from_pretrained(path, revision=revision)
        if config.model_type not in PLAIN + ROTARY + MUTUAL:
            known = ", ".join(PLAIN + ROTARY + MUTUAL)
            raise UserError(
                f"model.vision: pictures are for {known}, and {path} is a {config.model_type}; set model.vision=null"
            )
        self.fewer = FEWER.get(config.model_type, FEWER["others"])
        self.context = context_of(config)
        try:
            self.images = AutoImageProcessor.from_pretrained(path, revision=revision, **of_python(settings or {}))
            self.processor = processor_of(config, path, self.images, tokenizer, revision)
        except Exception as error:  # a damaged file may raise anything
            raise UserError(
                f"model.vision: {path} has no processor of pictures that can be loaded: {one_line(error)}"
            ) from error
        known = {
            "backend",
            *getattr(self.images.valid_kwargs, "__annotations__", settings or {}),
            *self.images.to_dict(),
        }
        if unknown := [name for name in settings or {} if name not in known]:
            line = f"model.pictures.{unknown[0]}: the image processor of {path} has no such setting"
            raise UserError(f"{line}; for fewer tokens set model.pictures={self.fewer}")
        self.kind, self.repeated = config.model_type, config.image_token_id
        self.text = getattr(self.processor, "boi_token", None) or self.processor.image_token
        self.placeholder = tokenizer.convert_tokens_to_ids(self.text)
        # as long as anybody has the picture
        self.known: WeakKeyDictionary[Picture, tuple[int, ...]] = WeakKeyDictionary()
        self.kept: OrderedDict[int, Seen] = OrderedDict()
        self.bytes = 0  # of the pixels in `kept`
        # of the prompts so far, the pictures of the one with the most of their tokens
        self.fullest: Sequence[Picture] = ()
        # of `copy`, by id: a picture, and the id of the one that it copies
        self.copies: dict[int, tuple[Picture, int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def ids(self, picture: Picture) -> tuple[int, ...]:
        """Return the tokens of a picture in a prompt."""
        if (found := self.known.get(picture)) is None:
            found = self.known[picture] = (self.kept.get(picture.id) or self.see(picture)).ids
        return found

    def pixels(self, number: int) -> Mapping[str, Tensor]:
        """Return what the tower reads of the picture with this id, in the host's memory. The largest ones that were used last are
        kept."""
        _, number = self.copies.get(number, (None, number))
        if number not in self.kept:
            self.see(picture_of(number))
        self.kept.move_to_end(number)
        return self.kept[number].pixels

    def copy(self, number: int, i: int) -> Picture:
        """Return copy i of the picture with this id: another picture, which is seen as that one is. For a forecast."""
        picture = Picture(picture_of(number).data + i.to_bytes(8))
        self.known[picture] = tuple(picture.id if j == number else j for j in self.ids(picture_of(number)))
        self.copies[picture.id] = picture, number
        return picture

    def see(self, picture: Picture) -> Seen:
        """Run the processor on a picture, and keep what it makes."""
        seen = self.seen(picture)
        if self.context is not None and len(seen.ids) >= self.context:
            line = (
                f"picture {picture.name} is {plural(len(seen.ids), 'token')}, and the model's context {self.context:,}"
            )
            raise UserError(f"{line}: make it smaller, or set model.pictures={self.fewer}")
        if picture.id in self.kept:
            self.bytes -= size_of(self.kept.pop(picture.id).pixels)
        self.kept[picture.id] = seen
        self.bytes += size_of(seen.pixels)
        while len(self.kept) > 1 and self.bytes > PIXELS:
            self.bytes -= size_of(self.kept.popitem(last=False)[1].pixels)
        return seen

    def image(self, picture: Picture) -> Any:
        """Return a picture as an image of PIL, in RGB. Raises UserError for a file that is none."""
        from PIL import Image

        try:
            with Image.open(BytesIO(picture.data)) as opened:
                return opened.convert("RGB")
        except Exception as error:
            raise UserError(
                f"picture {picture.name} cannot be read ({one_line(error)}): give a PNG or JPEG file"
            ) from error

    def seen(self, picture: Picture) -> Seen:
        """Return what the processor makes of a picture. Raises UserError for one that does not suit it."""
        image = self.image(picture)
        try:
            made = self.processor(images=[image], text=[self.text], return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # a picture of 1 x 400 pixels, for example
            line = (
                f"picture {picture.name} of {image.width} x {image.height} pixels does not suit the model's processor"
            )
            raise UserError(f"{line}: {one_line(error)}") from error
        ids = made["input_ids"][0].tolist()
        pixels = {name: made[name] for name in made if name in READ}
        lit(pixels["pixel_values"])
        return Seen(tuple(picture.id if i == self.repeated else i for i in ids), pixels)

    def expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[int, ...]:
        """Return the ids of a prompt with each placeholder replaced by the tokens of its picture. Raises UserError if these are
        not as many."""
        if (found := [*ids].count(self.placeholder)) != len(pictures):
            token = self.tokenizer.convert_ids_to_tokens(self.placeholder)
            line = f"a prompt has {len(pictures)} pictures, and its text {found} places for them ({token})"
            raise UserError(f"{line}: the chat template drops pictures, or a text has this token: leave it out")
        if self.tokens(pictures) > self.tokens(self.fullest):
            self.fullest = pictures
        left = iter(pictures)
        return tuple(j for i in ids for j in (self.ids(next(left)) if i == self.placeholder else (i,)))

    def tokens(self, pictures: Sequence[Picture]) -> int:
        """Return how many tokens pictures take."""
        return sum(len(self.ids(picture)) for picture in pictures)

    def folded(self, ids: Sequence[int]) -> tuple[tuple[int, ...], list[Picture]]:
        """Return a prompt as `expanded` took it: with one placeholder for each picture, and the pictures."""
        short: list[int] = []
        pictures: list[Picture] = []
        place = 0
        while place < len(ids):
            number = ids[place]
            if number >= 0:
                short.append(number)
                place += 1
                continue
            pictures.append(picture_of(number))
            whole = self.ids(pictures[-1])
            before = next(i for i in count() if whole[i] == number)  # tokens of the picture before its first place
            if tuple(ids[place - before : place - before + len(whole)]) != whole:
                raise UserError(
                    f"a prompt has a part of picture {pictures[-1].name} only: give more tokens (sampling, renderer.keep)"
                )
            del short[len(short) - before :]
            short.append(self.placeholder)
            place += len(whole) - before
        return tuple(short), pictures

    def save(self, folder: Path) -> None:
        """Write the processor with its settings into the folder of a saved policy, which sees with it like the model."""
        self.images.save_pretrained(folder)
        own = json.loads(Path(folder, PICTURES).read_text())
        for name in (PROCESSOR, "video_preprocessor_config.json"):
            kept = cached_file(self.path, name, revision=self.revision, _raise_exceptions_for_missing_entries=False)
            if kept is not None:
                of_parts = json.loads(Path(kept).read_text())
                changed = {"image_processor": own} if "image_processor" in of_parts else {}
                Path(folder, name).write_text(json.dumps(of_parts | changed, indent=2))

    @cached_property
    def banned(self) -> list[int]:
        """The ids that no policy may sample, since a model reads pictures in their place."""
        names = ("image_token", "video_token")
        tokens = [token for name in names if isinstance(token := getattr(self.processor, name, None), str)]
        ids = {self.repeated, self.placeholder, *self.tokenizer.convert_tokens_to_ids(tokens)}
        return sorted(i for i in ids if isinstance(i, int) and i >= 0)

    @cached_property
    def spellings(self) -> list[str]:
        """How texts spell these tokens."""
        return self.tokenizer.convert_ids_to_tokens(self.banned)


def lit(pixels: Tensor) -> None:
    """Change the pixels of a picture's parts, [1, parts, C, H, W], in place: Idefics3 takes parts whose pixels are all 0 for
    padding, and drops them. Other pixels stay."""
    if pixels.dim() == 5:
        pixels[~pixels.flatten(2).any(-1), 0, 0, 0] = 1e-4


def of_python(settings: Any) -> Any:
    """Return settings as dictionaries of Python, which processors want, and other values as they are."""
    return {name: of_python(value) for name, value in settings.items()} if isinstance(settings, Mapping) else settings


def size_of(pixels: Mapping[str, Tensor]) -> int:
    """Return the bytes of what the tower reads of a picture."""
    return sum(x.nbytes for x in pixels.values())


def processor_of(
    config: PretrainedConfig, path: str, images: Any, tokenizer: PreTrainedTokenizerBase, revision: str | None
) -> Any:
    """Return a model's processor for pictures and text alone: those for videos need further libraries."""
    if config.model_type in ROWS:
        return PixtralRows(
            images, tokenizer, config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        )
    kind = PROCESSOR_MAPPING[type(config)]

    class Pictures(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
            return type(argument)

    settings, _ = kind.get_processor_dict(path, revision=revision)
    parts = dict.fromkeys(kind.get_attributes()) | {"image_processor": images, "tokenizer": tokenizer}
    own = {name: value for name, value in settings.items() if name not in {*parts, *OF_OTHERS}}
    return Pictures(**parts, **own)


@dataclass
class PixtralRows:
    """The processor of Pixtral, whose class in transformers imports torchvision. A picture is rows of places, each of which ends
    with a token of its own (arXiv 2410.07073)."""

    image_processor: Any
    tokenizer: PreTrainedTokenizerBase
    side: int  # pixels of a place
    image_token: str = "[IMG]"

    def __call__(
        self, images: list[Any], text: list[str], return_tensors: str, add_special_tokens: bool
    ) -> dict[str, Tensor]:
        """Return the arguments of the tower, and the ids of one picture."""
        made = self.image_processor(images=images, patch_size=self.side, return_tensors=return_tensors)
        height, width = (int(size) // self.side for size in made["image_sizes"][0])
        rows = "[IMG_BREAK]".join([self.image_token * width] * height) + "[IMG_END]"
        return {**made, "input_ids": self.tokenizer(rows, add_special_tokens=False, return_tensors="pt").input_ids}
