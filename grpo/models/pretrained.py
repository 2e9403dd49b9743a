"""A Hugging Face causal language model in a folder or on the hub, and how it is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from grpo.system.errors import UserError, oneof

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Pretrained:
    """A model by folder or hub id (path), and how to load it. The folder of a PEFT adapter names its base.

    dtype: of the parameters. Those in 16 bits are trained through float32 masters (master_weights.py); the loss is not scaled,
    so small gradients are 0 in float16. chat_template: None for the tokenizer's, a file with another one, or "none" for prompts
    of plain text, as a base model reads them.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        oneof("model.dtype", self.dtype, DTYPES)

    def _load(self, loader: type, **kwargs):
        try:
            return loader.from_pretrained(
                self.path, revision=self.revision, trust_remote_code=self.trust_remote_code, **kwargs
            )
        except (OSError, ValueError, ImportError) as error:
            nowhere = "is neither a local folder nor a model that the hub gives (is there a network? is it gated?)"
            what = "has no model that transformers can load" if Path(self.path).exists() else nowhere
            raise UserError(f"model.path={self.path} {what}: {str(error).splitlines()[0]}") from error

    def base(self) -> "Pretrained | None":
        """The model that an adapter's folder adapts; None where the folder is a whole model."""
        base = base_path(self.path)
        return None if base == self.path else replace(self, path=base, revision=None)

    def check_takes(self, adapter: object) -> None:
        """Raises UserError for an adapter (or its factory; None for none) on an adapter."""
        if adapter and self.base():
            line = f"model.path={self.path} is an adapter, and a new one on it would be saved without it"
            raise UserError(f"{line}: adapter=none trains it merged into its base")

    def config(self) -> PretrainedConfig:
        base = self.base()
        return base.config() if base else self._load(AutoConfig)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self._load(AutoTokenizer)
        if self.chat_template is not None:
            file = Path(self.chat_template).expanduser()
            if self.chat_template != "none" and not file.is_file():
                raise UserError(f"model.chat_template={file} is not a file: give one, none for plain text, or null")
            tokenizer.chat_template = None if self.chat_template == "none" else file.read_text(encoding="utf-8")
        return tokenizer

    def outline(self) -> nn.Module:
        """The same modules as `model`, with random weights: no file of weights is read."""
        config = self.config()
        dtype = config.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=self.attn_implementation, trust_remote_code=self.trust_remote_code
        ).eval()

    def model(self) -> nn.Module:
        """The model in evaluation mode, where it stays: dropout would make the trainer disagree with the engine.

        An adapter is merged into its base, and training continues from both.
        """
        if base := self.base():
            merged = PeftModel.from_pretrained(base.model(), self.path).merge_and_unload()
            return merged.requires_grad_(True).eval()
        dtype = "auto" if self.dtype == "auto" else getattr(torch, self.dtype)
        return self._load(AutoModelForCausalLM, dtype=dtype, attn_implementation=self.attn_implementation).eval()


def base_path(path: str) -> str:
    """The folder or hub id of a whole model: `path`, or the base that an adapter's folder names."""
    if (Path(path) / "adapter_config.json").exists():
        return PeftConfig.from_pretrained(path).base_model_name_or_path
    return path
