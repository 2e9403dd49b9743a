"""Attention by plan for layers that change their scores: caps, sinks, biases by position, chunks. Door: `door.follow`, which
apps/engines.py calls for every program."""
