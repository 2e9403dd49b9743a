"""The context of an engine: the tokens of a prompt and its answer together."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from grpo.system.errors import UserError

log = logging.getLogger(__name__)

# returns the tokens of the longest sequence that a program will sample; None: only the model bounds it
Bound = Callable[[], int | None]


def check_context(prompt: int, answer: int, context: int | None, way_out: str = "lower max_tokens") -> None:
    """Raise UserError if a prompt and its answer, both in tokens, exceed a context. context: None has no
    limit. way_out: what to do besides shorter prompts."""
    if context is not None and prompt + answer > context:
        tokens = f"a prompt of {prompt} tokens and an answer of {answer}"
        raise UserError(f"{tokens} exceed the context of {context}: {way_out}, or use shorter prompts")


def bounded(args: Mapping[str, Any], most_tokens: Bound | None) -> dict[str, int]:
    """Return vLLM's argument max_model_len for a program whose sequences have a bound; empty if they have
    none, or if the user's args give the length."""
    if args.get("max_model_len") is not None or most_tokens is None or (most := most_tokens()) is None:
        return {}
    log.info("engine: the longest sequence of this run has %d tokens, and vLLM makes room for it (max_model_len)", most)
    return {"max_model_len": most + 1}  # `score` puts a token after the sequence
