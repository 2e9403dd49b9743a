"""The room that an engine's context leaves for an answer."""

from grpo.system.errors import UserError


def check_context(prompt: int, answer: int, context: int | None) -> None:
    """Raise UserError if a prompt and max_tokens, both in tokens, exceed a context. context: None has no limit."""
    if context is not None and prompt + answer > context:
        tokens = f"a prompt of {prompt} tokens and max_tokens={answer}"
        raise UserError(f"{tokens} exceed the context of {context}: lower max_tokens, or use shorter prompts")
