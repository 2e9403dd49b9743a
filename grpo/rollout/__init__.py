"""Plays episodes in parallel, scores them, and turns them into tensors."""
