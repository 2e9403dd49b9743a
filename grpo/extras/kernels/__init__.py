"""Faster kernels on a GPU: FlexAttention, Liger. Door: `model.kernels`; FlexAttention is a Kernel of models/packed_attention."""
