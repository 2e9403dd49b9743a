"""Reward functions, their combination, and graders. Text in, numbers out."""
