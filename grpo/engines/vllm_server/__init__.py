"""vLLM servers, on this or other machines."""

from grpo.moved import door

__getattr__ = door(__name__)
