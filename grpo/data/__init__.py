"""Rows of a dataset, and which prompts belong to which rollout."""

from grpo.moved import door

__getattr__ = door(__name__)
