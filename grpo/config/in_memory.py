"""A model that a Python program gives to `grpo.train` or `grpo.evaluate`, in place of one in a folder."""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError
from grpo.system.loading import finite


@dataclass(frozen=True)
class InMemory(Pretrained):
    """A transformers model that a program has in memory, which is trained itself. given_tokenizer: None for
    the one in `path`."""

    given: nn.Module | None = None
    given_tokenizer: PreTrainedTokenizerBase | None = None

    def base(self) -> None:
        return None

    def config(self) -> PretrainedConfig:
        return self.given.config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return super().tokenizer() if self.given_tokenizer is None else self.given_tokenizer

    def model(self, mapped: bool = False) -> nn.Module:
        if self.quantization or hasattr(self.given, "quantization_method"):
            raise UserError("model: an object has plain weights: give its name, and model.quantization")
        return finite("the given model", self._ready(self.given), "load it again").eval()
