"""`python -m grpo.rewards` profiles the reward of a task: see grpo/extras/judges/profile.py."""

import sys

from grpo.apps.cli import one_line_errors, quiet
from grpo.extras.judges.profile import main

if __name__ == "__main__":
    quiet()
    with one_line_errors("train"):
        main(sys.argv[1:])
