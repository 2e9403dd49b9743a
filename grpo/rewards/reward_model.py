"""A reward model: a sequence-classification checkpoint with one label, and a tokenizer of its own."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from grpo.system.errors import UserError


class Classifier:
    """Reads prompt and completion, right padded, and gives its one logit.

    path: a folder or a hub id; tokenizer: another one's, if it has none. Conversations are rendered by its own chat template.
    max_length: tokens that are read, from the end; null: as many as the model can. device: null takes a GPU where there is one.
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
        self.path, self.max_rows = path, max_rows
        self.__name__ = Path(path).name
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.lock = threading.Lock()  # groups are scored side by side; one model is not

        def load(loader: Any, source: str, **kwargs: Any) -> Any:
            try:
                return loader.from_pretrained(source, **kwargs)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"the reward model {path} is neither a folder with one nor on the hub: {reason}"
                ) from error

        config = load(AutoConfig, path)
        self.tokenizer = load(AutoTokenizer, tokenizer or path, padding_side="right", truncation_side="left")
        if config.num_labels != 1:
            raise UserError(
                f"the reward model {path} has {config.num_labels} labels: it must have one, whose logit is the reward"
            )
        self.max_length = max_length or getattr(config, "max_position_embeddings", None)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = load(AutoModelForSequenceClassification, path, dtype=dtype).to(self.device).eval()
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        with self.lock, torch.no_grad():
            values: list[float] = []
            for start in range(0, len(texts), self.max_rows):
                inputs = self.tokenizer(
                    texts[start : start + self.max_rows],
                    padding=True,
                    truncation=self.max_length is not None,
                    max_length=self.max_length,
                    add_special_tokens=isinstance(prompts[0], str),  # a template has written its own
                    return_tensors="pt",
                )
                values += self.model(**inputs.to(self.device)).logits[:, 0].float().tolist()
        return values

    def _text(self, prompt: Any, completion: str | Sequence[Mapping[str, str]]) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"the reward model {self.path} has no chat template, and the task's prompts are conversations"
            )
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
