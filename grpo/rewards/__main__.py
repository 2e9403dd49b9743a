"""`python -m grpo.rewards` profiles the reward of a task: see grpo/apps/profile_rewards.py."""

import sys

from grpo.apps.cli import one_line_errors, quiet
from grpo.apps.profile_rewards import main

if __name__ == "__main__":
    quiet()
    with one_line_errors("train"):
        main(sys.argv[1:])
