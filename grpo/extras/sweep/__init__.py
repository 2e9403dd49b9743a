"""Runs sweeps: a process for each job. Door: `python train.py -m`."""

PROGRAMS = ("jobs", "arms")
