"""Digits to sort: a task for model=tiny, with the author of its warm start and a reward (docs/tasks.md).

python -m examples.sorting rows.jsonl
"""

import json
import random
import sys
from pathlib import Path

from grpo.env.messages import Message
from grpo.env.types import State
from grpo.extras.grading.answers import extract_answer


def question(rng):
    """Return 3 to 6 digits, as `7 3 9 1`."""
    return " ".join(rng.choices("0123456789", k=rng.randint(3, 6)))


def answer(numbers, rng, hasty, slips):
    """Take the smallest of what is left, a line each. A hasty author stops early and leaves the rest as it is."""
    left, done, lines = numbers.split(), [], []
    while left and not (lines and rng.random() < hasty):
        smallest = rng.choice(left) if rng.random() < slips else min(left)
        left.remove(smallest)
        done.append(smallest)
        lines.append(" ".join([smallest, ":", *left]))
    return "\n".join([*lines, "\\boxed{" + " ".join(done + left) + "}"])


def worked_answers(count, seed, hasty=0.0, slips=0.0):
    """Return conversations of a question and its answer, from which the model learns to speak."""
    rng = random.Random(f"sorting {seed}")
    asked = [question(rng) for _ in range(count)]
    return [State((Message("user", q), Message("assistant", answer(q, rng, hasty, slips)))) for q in asked]


def is_sorted(completions, gold, **columns):
    """Reward a box with all digits in order."""
    return [float(extract_answer(text) == right) for text, right in zip(completions, gold, strict=True)]


def rows(count, seed):
    """Return questions with their right answers, in no relation to those of the author."""
    rng = random.Random(f"rows {seed}")
    return [{"prompt": q, "answer": " ".join(sorted(q.split()))} for q in (question(rng) for _ in range(count))]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows(2000, seed=0)))
