"""Profiles the reward of a task; see grpo/apps/profile_rewards.py."""

import runpy

runpy.run_module("grpo.apps.profile_rewards", run_name="__main__")
