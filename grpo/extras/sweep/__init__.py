"""Runs sweeps: a process for each job. Door: `python train.py -m`."""

NEEDS = ("network", "report")  # jobs end with it
PROGRAMS = ("jobs", "arms")
