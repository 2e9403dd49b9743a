"""vLLM in this process."""

from grpo.moved import door

__getattr__ = door(__name__)
