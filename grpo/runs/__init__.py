"""What a run leaves behind, and everything that reads it."""

from grpo.moved import door

__getattr__ = door(__name__)
