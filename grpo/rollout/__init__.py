"""Episodes played side by side, scored, and made into tensors."""

from grpo.moved import door

__getattr__ = door(__name__)
