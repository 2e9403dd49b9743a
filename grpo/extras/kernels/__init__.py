"""Faster kernels on a GPU: FlexAttention, compiled pieces, Liger. Door: `model.kernels`."""
