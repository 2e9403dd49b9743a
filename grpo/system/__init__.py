"""Helpers for every room: errors, files, processes, calls, metrics. They know nothing of learning."""
