"""Rewards to advantages to a loss: pure functions of tensors."""
