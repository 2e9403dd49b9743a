"""The language model in a multimodal one, which is loaded and saved whole: only what reads and writes text is
trained."""

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether this is the configuration of a model that reads images too, as Qwen3.5, Gemma 3 4B and
    Gemma 4."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder


def loader_of(config: PretrainedConfig) -> type:
    """Return the class of transformers that loads such a model."""
    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def beside_language(model: nn.Module) -> Iterator[str]:
    """Yield the names of the modules in which a multimodal model reads what is not text; none for a language
    model, and where `model.vision=trained`."""
    if not is_multimodal(model.config) or getattr(model, "vision_learns", False):
        return
    language = {*model.get_decoder().modules(), model.get_output_embeddings()}
    yield from (name for name, module in model.named_modules() if not language & {*module.modules()})


def probe_ids(model: nn.Module) -> Sequence[tuple[int, ...]]:
    """Return the tokens of two pictures, with which a model that sees is tried; of others nothing."""
    return getattr(model.get_decoder(), "probe_ids", ((), ()))


def learning(model: nn.Module) -> nn.Module:
    """Let all weights learn, except those of modules `beside_language`."""
    model.requires_grad_(True)
    for name in beside_language(model):
        model.get_submodule(name).requires_grad_(False)
    return model
