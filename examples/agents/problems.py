"""Rows for the agents of this folder, and the dialogues that a tiny model needs before it can be one.

python examples/agents/problems.py wordmath > wordmath.jsonl    # questions that the model answers itself
python examples/agents/problems.py tools > tools.jsonl          # questions with large numbers, for a calculator or a program
"""

import json
import random
import re
import sys

from grpo.env.messages import Message
from grpo.env.types import State
from tasks.wordmath import Problem, draw_from

SIZES = {"wordmath": ((2, 4), 99), "tools": ((2, 3), 9999)}  # steps, largest number


def program(problem: Problem, rng: random.Random, hasty: float = 0.0, slips: float = 0.0) -> str:
    """Return a program that prints the answer, a line for each step. A hasty author stops before any of them."""
    lines, last = problem.working(rng, hasty, slips)
    named: dict[str, str] = {}  # from a result to the name that later lines use
    written = []
    for name, line in zip("abcdefgh", lines, strict=False):
        left, sign, right, result = re.fullmatch(r"(\d+)(\D)(\d+)=(\d+)", line).groups()
        sign = "//" if sign == "/" else sign
        written.append(f"{name} = {named.get(left, left)} {sign} {named.get(right, right)}")
        named[result] = name
    return "\n".join([*written, f"print({named.get(str(last), last)})"])


def worked_programs(count: int, seed: int, hasty: float = 0.0, slips: float = 0.0) -> list[State]:
    """Return questions with a program that prints the answer, to warm up a model."""
    rng = random.Random(f"programs {seed}")
    problems = (draw_from("train", rng, *SIZES["tools"]) for _ in range(count))
    said = ((problem.question, program(problem, rng, hasty, slips)) for problem in problems)
    return [State((Message("user", question), Message("assistant", text))) for question, text in said]


def main(kind: str, count: int = 2000) -> None:
    rng = random.Random(f"rows {kind}")
    for _ in range(count):
        problem = draw_from("test", rng, *SIZES[kind])  # none that a tiny model has seen in its warm-up
        print(json.dumps({"prompt": problem.question, "answer": str(problem.worked(rng)[1])}))


if __name__ == "__main__":
    main(sys.argv[1])
