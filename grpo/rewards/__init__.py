"""Reward functions, their combination, and graders. Text in, numbers out."""

from grpo.moved import door

__getattr__ = door(__name__)
