"""How good is the policy? Accuracy, pass@k and their like, each with its interval."""

from grpo.moved import door

__getattr__ = door(__name__)
