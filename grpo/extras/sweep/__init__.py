"""Runs sweeps: a process for each job."""
