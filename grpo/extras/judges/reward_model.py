"""A reward model: a sequence-classification checkpoint with one label, and a tokenizer of its own."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from grpo.system.errors import UserError, one_line
from grpo.system.loading import STRICT, fully_loaded


def positions(model: nn.Module) -> int | None:
    """Return how many tokens a model can read; None if it has no limit. RoBERTa and its like do not use the first positions."""
    most = getattr(model.config, "max_position_embeddings", None)
    learned = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    unused = next((m.padding_idx + 1 for m in learned if getattr(m, "padding_idx", None) is not None), 0)
    return most and most - unused


class Classifier:
    """Reads prompt and completion, right padded, and returns the model's one logit.

    path: a folder or a hub id. tokenizer: another model's, for a model that has none. Its chat template renders conversations.
    max_length: tokens that are read, from the end; null: the model's limit. device: null takes a GPU if there is one.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        max_rows: int = 16,
        max_length: int | None = None,
    ) -> None:
        self.path, self.__name__ = path, Path(path).name
        self.lock = threading.Lock()  # groups are scored in several threads, which share one model
        sides = {"padding_side": "right", "truncation_side": "left"}
        try:
            own_tokenizer = AutoTokenizer.from_pretrained(tokenizer or path, **sides)
            loaded = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, **STRICT)
        except (OSError, ValueError) as error:
            reason = one_line(error)
            raise UserError(f"the reward model {path} is neither a folder with one nor on the hub: {reason}") from error
        model = fully_loaded(f"the reward model {path}", loaded)
        self.pipe = pipeline("text-classification", model, tokenizer=own_tokenizer, device=device, batch_size=max_rows)
        self.tokenizer, config = self.pipe.tokenizer, self.pipe.model.config
        if config.num_labels != 1:
            raise UserError(f"the reward model {path} has {config.num_labels} labels: it must have one, the reward")
        self.max_length = max_length or positions(self.pipe.model)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        config.pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        with self.lock:
            outputs = self.pipe(
                texts,
                function_to_apply="none",
                truncation=self.max_length is not None,
                max_length=self.max_length,
                add_special_tokens=isinstance(prompts[0], str),  # a chat template adds its own
            )
        return [output["score"] for output in outputs]

    def _text(self, prompt: Any, completion: str | Sequence[Mapping[str, str]]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        if self.tokenizer.chat_template is None:
            raise UserError(f"the reward model {self.path} has no chat template, and the prompts are conversations")
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
