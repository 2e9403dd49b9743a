"""Faster kernels: FlexAttention and Liger on a GPU, own layers on a CPU. Door: `model.kernels`; flex.py is a Kernel of models."""
