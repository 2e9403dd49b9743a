"""Rows of files (JSON, CSV, Parquet) and of the hub, as they were written. Door: a task's `examples` (docs/tasks.md)."""

NEEDS = ("images",)  # pictures of rows
