"""A Hugging Face causal language model in a folder or on the hub, and how to load it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from grpo.models.adapted import dequantize
from grpo.models.language import is_multimodal, learning, loader_of
from grpo.system.errors import UserError
from grpo.system.loading import STRICT, finite, fully_loaded
from grpo.system.output.console import busy
from grpo.system.ranges import enforced

log = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Kernels = Literal["auto", "liger", "none"]
Bits = Literal["4bit", "8bit"]
Vision = Literal["frozen", "trained"]


@enforced("model")
@dataclass(frozen=True)
class Pretrained:
    """A model by folder or hub id (path), and how to load it. The folder of a PEFT adapter names its base.

    dtype: of the parameters. 16-bit parameters are trained through float32 masters (master_weights.py); in
    float16 the loss has a scale. quantization: of the base of an adapter; quantizer: what stores it so, in
    place, called with the model and the quantization. head_dtype: of the product with the vocabulary matrix, None
    for `dtype`; head: what lets a model compute so, in place, called with the model and the type. vision: whether
    messages may have pictures, and whether the tower that reads them learns; pictures: settings of the model's image
    processor, as max_pixels; eyes: what sees. chat_template: None for the tokenizer's, a file with another one, or
    "none" for prompts of plain text, for a base model. kernels: of a policy that learns on a GPU, see
    grpo/extras/kernels/liger.py; auto: Liger's if they are installed. called: the group of its keys, in errors.
    """

    path: str
    revision: str | None = None
    dtype: Dtype = "float32"
    quantization: Bits | None = None
    quantizer: Callable[..., Any] | None = None
    head_dtype: Literal["float32"] | None = None
    head: Callable[[nn.Module], nn.Module] | None = None
    vision: Vision | None = None
    pictures: Mapping[str, Any] | None = field(default=None, hash=False)
    eyes: Callable[["Pretrained"], Any] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    kernels: Kernels = "auto"
    called: str = "model"

    @property
    def named(self) -> str:
        """How errors name it."""
        return f"{self.called}.path={self.path}"

    def _load(self, loader: type, part: str = "model", **kwargs):
        try:
            return loader.from_pretrained(
                self.path, revision=self.revision, trust_remote_code=self.trust_remote_code, **kwargs
            )
        except Exception as error:  # a damaged file may raise anything
            nowhere = "is neither a local folder nor a model that the hub gives (is there a network? is it gated?)"
            what = f"has no {part} that transformers can load" if Path(self.path).exists() else nowhere
            reason = f"{type(error).__name__}: {shorten(str(error), 300)}"
            raise UserError(f"{self.named} {what}: {reason}") from error

    def _ready(self, model: nn.Module) -> nn.Module:
        """Return the model with its head as it computes, and its weights as they are stored: quantized and frozen,
        or ready to learn."""
        for key, slot in (("quantization", "quantizer"), ("head_dtype", "head"), ("vision", "eyes")):
            if getattr(self, key) and getattr(self, slot) is None:
                line = f"{self.called}.{key}={getattr(self, key)} needs {self.called}.{slot}"
                raise UserError(f"{line}, the function that conf/model/base.yaml names; or set it to null")
        if self.head:
            model = self.head(model, self.head_dtype)
        if self.vision:
            model = self.eyes(self).opened(model, learns=self.vision == "trained")
        return self.quantizer(model, self.quantization) if self.quantization else learning(model)

    def base(self) -> "Pretrained | None":
        """Return the model that an adapter's folder adapts; None if the folder holds a whole model."""
        base = base_path(self.path, self.called)
        return None if base == self.path else replace(self, path=base, revision=None)

    def check_takes(self, adapter: object) -> None:
        """Raises UserError if this is an adapter and would get a new one, or is quantized and would learn
        without one.

        adapter: the new one or its factory, or None.
        """
        if self.quantization and not adapter:
            raise UserError(f"model.quantization={self.quantization} is for a base that is frozen: set adapter=lora")
        if adapter and self.base():
            line = f"{self.named} is an adapter, and a new one on it would be saved without it"
            raise UserError(f"{line}: adapter=none trains it merged into its base")

    def config(self) -> PretrainedConfig:
        """The configuration, without weights. Raises UserError if this is no causal language model."""
        if base := self.base():
            return base.config()
        config = self._load(AutoConfig, "config.json")
        kinds = config.architectures or ["CausalLM"]
        is_causal = any("CausalLM" in kind or "LMHead" in kind for kind in kinds) or is_multimodal(config)
        if not self.trust_remote_code and not is_causal:
            needed = "a model that predicts the next token is needed, one whose config.json has a ...ForCausalLM"
            raise UserError(f"{self.named} is a {', '.join(kinds)}: {needed} in architectures")
        if getattr(config.get_text_config(), "num_hidden_layers", 1) < 1:
            raise UserError(f"{self.named} has num_hidden_layers=0 in its config.json: a model has layers")
        return config

    def context(self) -> int:
        """The number of tokens that the model takes at most. Raises UserError if its configuration has no
        such limit."""
        if (limit := context_of(self.config())) is None:
            raise UserError(f"{self.named} has no max_position_embeddings in its config.json: set it there")
        return limit

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template of the settings."""
        tokenizer = self._load(AutoTokenizer, "tokenizer")
        if self.vision:
            tokenizer.sight = self.eyes(self)  # by which renderers turn pictures into tokens
        last, rows = max(tokenizer.get_vocab().values(), default=0), self.config().get_text_config().vocab_size
        without_row = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows}
        # as of images, for which a text model has no use
        if without_row.keys() <= set(tokenizer.all_special_ids):
            # `renderer.encoded` refuses them in prompts, and no sample has them
            tokenizer.without_row = without_row
        else:
            beyond = f"the id {last} ({tokenizer.convert_ids_to_tokens(last)!r}), the model's embedding {rows} rows"
            fix = "save the model after model.resize_token_embeddings(len(tokenizer)), or take its own tokenizer"
            raise UserError(f"{self.named}: the tokenizer has {beyond}: {fix}")
        if self.chat_template is not None:
            file = Path(self.chat_template).expanduser()
            if self.chat_template != "none" and not file.is_file():
                raise UserError(f"model.chat_template={file} is not a file: give one, none for plain text, or null")
            try:
                tokenizer.chat_template = None if self.chat_template == "none" else file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"model.chat_template={file} could not be read: {error}; save it as UTF-8") from error
        return tokenizer

    def outline(self) -> nn.Module:
        """Return the same modules as `model`, with random weights. Reads no file of weights."""
        config = self.config()
        dtype = config.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        settings = {"dtype": dtype, "attn_implementation": self.attn_implementation}
        model = loader_of(config).from_config(config, **settings, trust_remote_code=self.trust_remote_code)
        return self._ready(model.eval())

    @busy("loading the model")
    def model(self, mapped: bool = False) -> nn.Module:
        """Return the model in evaluation mode, in which it is trained too: dropout would make trainer and
        engine disagree.

        An adapter is merged into its base, and training continues from the result. mapped: leave the weights
        in their files, from which each rank takes its part; they have the number type of the files, and the
        configuration has the wanted one.
        """
        if base := self.base():
            from peft import PeftModel  # takes seconds to import

            model = dequantize(base.model())  # the base that the adapter has learned on
            with read_by_peft(self.path, self.called):
                merged = PeftModel.from_pretrained(model, self.path).merge_and_unload()
            return finite(f"the adapter {self.named}", learning(merged)).eval()
        if mapped and self.quantization:
            raise UserError("strategy=fsdp2 does not shard a quantized base: set strategy=ddp")
        dtype = "auto" if self.dtype == "auto" or mapped else getattr(torch, self.dtype)
        # no device_map: Lightning, or each rank, moves the model to its device
        loader = loader_of(self.config())
        loaded = self._load(loader, dtype=dtype, attn_implementation=self.attn_implementation, **STRICT)
        model = fully_loaded(self.named, loaded).eval()
        if model.generation_config is None or model.generation_config.eos_token_id is None:
            never = "no completion ends before max_tokens, except at sampling.stop_ids"
            log.warning("%s has no end token: %s; set eos_token_id in its config.json", self.named, never)
        if mapped:
            model.config.get_text_config().dtype = model.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
            model.is_mapped = True
        return self._ready(model)


def context_of(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model takes at most; None if it has no limit.

    With `longrope` (Phi-3, arXiv 2402.13753) all positions of a batch change if one of its rows is longer
    than the original context. Earlier samples would then have other log-probabilities in training. So the
    original context is the limit.
    """
    config = config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    every = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    ropes = [rope for rope in every if rope.get("rope_type") == "longrope"]
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [rope.get("original_max_position_embeddings") for rope in ropes]
    return min((limit for limit in limits if limit is not None), default=None)


def differing_tokens(ours: Mapping[str, int], theirs: Mapping[str, int]) -> set[str]:
    """Return the tokens that do not have the same id in both vocabularies."""
    return {token for token, _ in ours.items() ^ theirs.items()}


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy that does not learn. Weights that are mapped from files stay there: no rank will change
    them."""
    mapped = model.parameters() if getattr(model, "is_mapped", False) else ()
    return deepcopy(model, {id(p): nn.Parameter(p.detach()) for p in mapped}).requires_grad_(False)


def base_path(path: str, called: str = "model") -> str:
    """Return the folder or hub id of a whole model: `path`, or the base that an adapter's folder names.
    called: in errors."""
    if (Path(path) / "adapter_config.json").exists():
        from peft import PeftConfig

        with read_by_peft(path, called):
            base = PeftConfig.from_pretrained(path).base_model_name_or_path
        if not base:
            raise UserError(f"{called}.path={path}: its adapter_config.json names no model as base_model_name_or_path")
        return base
    return path


@contextmanager
def read_by_peft(path: str, called: str = "model") -> Iterator[None]:
    """Turn any exception of peft into one line."""
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        reason = f"{type(error).__name__}: {shorten(str(error), 300)}"
        raise UserError(f"{called}.path={path} is an adapter that peft cannot load: {reason}; save it again") from error
