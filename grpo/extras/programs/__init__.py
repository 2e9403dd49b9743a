"""Runs programs against their tests in a sandbox."""
