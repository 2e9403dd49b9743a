"""vLLM as servers, here or on other machines."""

from grpo.moved import door

__getattr__ = door(__name__)
