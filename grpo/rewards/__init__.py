"""Reward functions, how several become one, graders. Text in, numbers out."""

from grpo.moved import door

__getattr__ = door(__name__)
