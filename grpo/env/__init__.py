"""Reinforcement learning in message space, and how messages become tokens."""
