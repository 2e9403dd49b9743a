"""Evaluates the policy: accuracy, pass@k and other metrics, each with a confidence interval."""

from grpo.moved import door

__getattr__ = door(__name__)
