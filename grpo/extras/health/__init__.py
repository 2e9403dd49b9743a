"""Warns once when a metric leaves the range of healthy runs, stops a run that has gone wrong, and says who waited for whom.

Door: a callback (`callbacks=health`).
"""
