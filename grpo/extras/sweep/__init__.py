"""Runs sweeps: a process for each job. Door: `python train.py -m`."""

NEEDS = ("report",)
PROGRAMS = ("jobs", "arms")
