"""vLLM in this process with pictures: prompts come with the ids of pictures, as everywhere, and vLLM gets the files.

vLLM takes one placeholder for each picture and expands it itself. It does so with the trainer's own processor, and its tokens
are compared with the trainer's before any is sampled.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.processing_utils import ProcessingKwargs

from grpo.extras.images.eyes import NEVER
from grpo.extras.images.sight import MUTUAL, PixtralRows, Sight, lit
from grpo.system.errors import UserError

PROCESSORS: dict[str, Any] = {}  # by the name with which vLLM was built: the processor that it uses


class SeeingEngine:
    """A `VLLMEngine` whose model sees. The class of an engine changes in place, before vLLM is built."""

    sight: Sight

    def _open(self) -> None:
        arguments = self._new.keywords
        arguments.pop("language_model_only", None)
        # the processor does it, as in the trainer: vLLM's layer reads the folder's files, and knows neither settings nor defaults
        arguments["mm_device_do_normalize"] = False
        # a processor for videos is not there
        arguments["limit_mm_per_prompt"] = {"video": 0} | (arguments.get("limit_mm_per_prompt") or {})
        # by this name, which stays as it is: vLLM may turn a hub id into a path
        arguments["served_model_name"] = name = f"{self._path} {id(self.sight)}"
        lend(name, self.sight)
        super()._open()
        self._llm._preprocess_cmpl_one = Rendering(self._llm._preprocess_cmpl_one, self.sight)
        self._llm.apply_model(lambda model: limit(model, self.sight.banned))

    def _take(self, model: nn.Module) -> None:
        super()._take(model)
        if getattr(model, "vision_learns", False):  # vLLM keeps features of pictures, by their names
            self._llm.llm_engine.reset_encoder_cache()

    def _release(self) -> None:
        self._llm.sleep(level=1)  # a level higher would forget a frozen tower, which no load brings back


class Rendering:
    """Stands before vLLM's own rendering of a prompt: ids of pictures in, their files out.

    render: vLLM's function for a prompt. image: a picture as an image of PIL; those of a group come one after the other.
    """

    def __init__(self, render: Any, sight: Sight) -> None:
        self.render, self.sight = render, sight
        self.image = lru_cache(maxsize=16)(sight.image)

    def __call__(self, prompt: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return what vLLM makes of a prompt. Raises UserError if its tokens are not the trainer's."""
        ids = prompt["prompt_token_ids"]
        if min(ids, default=0) >= 0:
            return self.render(prompt, *args, **kwargs)
        short, pictures = self.sight.folded(ids)
        files = {
            "multi_modal_data": {"image": [self.image(picture) for picture in pictures]},
            "multi_modal_uuids": {"image": [picture.name for picture in pictures]},
        }
        made = self.render({**prompt, **files, "prompt_token_ids": list(short)}, *args, **kwargs)
        ours = [i if i >= 0 else self.sight.repeated for i in ids]
        if made["prompt_token_ids"] != ours:
            names = ", ".join(picture.name for picture in pictures)
            line = f"vLLM reads {len(made['prompt_token_ids'])} tokens in a prompt with pictures {names}, the trainer {len(ours)}"
            raise UserError(f"{line}, or other ones: set engine=transformers")
        return made


def with_pictures(engine: Any, sight: Sight) -> None:
    """Let an engine take pictures, in place. Raises UserError for a model with which vLLM computes something else."""
    kind = sight.kind
    if kind in MUTUAL:
        line = f"tokens of a picture see each other in a {kind}, which vLLM does not compute on every device"
        raise UserError(f"engine=vllm: {line}: set engine=transformers")
    engine.sight = sight
    engine.__class__ = type(type(engine).__name__, (SeeingEngine, type(engine)), {})


def limit(model: nn.Module, banned: Sequence[int]) -> None:
    """Let vLLM's model give the tokens of pictures no probability, as the trainer's `Head`, in place."""
    compute, ids = model.compute_logits, torch.tensor(banned)

    def limited(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        return logits if logits is None else logits.index_fill(-1, ids.to(logits.device), NEVER)

    model.compute_logits = limited


def lend(name: str, sight: Sight) -> None:
    """Let vLLM use the trainer's processor for the model that it serves by this name."""
    from vllm.multimodal.processing import context

    if not PROCESSORS:
        load = context.cached_processor_from_config

        def lent(config: Any, **kwargs: Any) -> Any:
            found = PROCESSORS.get(config.served_model_name)
            return load(config, **kwargs) if found is None else found

        context.cached_processor_from_config = lent
    own = sight.processor
    PROCESSORS[name] = Lent(PixtralPixels(**vars(own)) if isinstance(own, PixtralRows) else own)


class Lent:
    """A processor with what vLLM reads of it. It has no processor of videos, whose sizes vLLM asks for all the same."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.video_processor = processor, processor.image_processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)

    def __call__(self, **given: Any) -> Any:
        """Return the arguments of the tower, as the trainer has them."""
        made = self.processor(**given)
        lit(made["pixel_values"])
        return made


class PixtralPixels(PixtralRows):
    """Pixtral's processor as vLLM calls it, which makes the tokens itself."""

    image_break_token, image_end_token, valid_processor_kwargs = "[IMG_BREAK]", "[IMG_END]", ProcessingKwargs

    def __call__(self, images: list[Any], **given: Any) -> Any:
        """Return the pixels of pictures."""
        return self.image_processor(images=images, patch_size=self.side, **given)
