"""Rewards from models: a language model as a judge, a reward model; how well they agree. Door: a reward function."""

PROGRAMS = ("profile",)
NEEDS = ("network",)  # addresses of judges
