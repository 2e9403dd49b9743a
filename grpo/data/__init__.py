"""Rows of a dataset, and which prompts belong to which rollout."""
