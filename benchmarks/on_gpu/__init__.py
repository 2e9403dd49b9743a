"""Parts of benchmarks/gpu.py, each of which measures one thing on one shape, in a process of its own.

jobs: runs the parts, one after another, each with a time limit. shapes: models and lengths. device: clock, memory, waits.
update, rollout, preflight, trl: the parts. table: their columns. Packages that may be missing are imported inside functions.
"""
