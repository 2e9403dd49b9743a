"""Word problems with numbers too large for mental arithmetic, and a calculator to call: tools on a laptop.

user       Sam has 214 coins. Sam buys 13 bags of 42 coins. How many coins does Sam have?
assistant  <tool_call>
           {"name": "calculator", "arguments": {"expression": "13*42"}}
           </tool_call>
tool       546
assistant  (a call of 214+546)
tool       760
assistant  \\boxed{760}
"""

import random
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Annotated, Any

from grpo.env.messages import Message, ToolCall, shown
from grpo.env.types import Example, State, Trajectory
from grpo.extras.grading.arithmetic import value
from grpo.extras.tools.env import ToolEnv, ToolError, spec_of
from grpo.rewards.combined import Weights
from grpo.rewards.resolve import Functions
from grpo.rewards.row_task import with_answer
from grpo.system.ranges import Range
from tasks.wordmath import Problem, Steps, Wordmath, draw_from

LARGEST = 9999
LONGEST = 200  # characters of an expression that are read
EXPRESSION = re.compile(r"(?:[0-9\s.+\-/()]|\*(?!\*))*")


def calculator(expression: str) -> str:
    """Works out an expression, exactly.

    Args:
        expression: numbers with + - * / and parentheses
    """
    result = value(expression) if len(expression) <= LONGEST and EXPRESSION.fullmatch(expression) else None
    if not isinstance(result, Fraction):
        fix = "give numbers with + - * / and parentheses, and divide by nothing that is 0"
        raise ToolError(f"{shown(expression)} has no value: {fix}")
    return str(result)  # 7/2 if it is not an integer


def called(expression: str) -> list[Message]:
    """Return a call of the calculator, and its result."""
    call = Message("assistant", "", (ToolCall("calculator", {"expression": expression}),))
    return [call, Message("tool", calculator(expression), name="calculator")]


def in_time(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory, without an answer if it ran out of turns."""
    return with_answer(trajectory, "") if trajectory.end == "out_of_turns" else trajectory


def conversation(problem: Problem, rng: random.Random, hasty: float = 0.0, slips: float = 0.0) -> State:
    """Return a conversation with a call for each line of the working, and a box. After a slip the next call, or the box, has
    another number than the tool's result."""
    lines, result = problem.working(rng, hasty, slips)
    messages = [Message("user", problem.question)]
    for line in lines:
        messages += called(line.partition("=")[0])
    messages.append(Message("assistant", f"\\boxed{{{result}}}"))
    return State(tuple(messages), (spec_of(calculator),))


def worked_answers(
    count: int,
    seed: int,
    hasty: float = 0.0,
    slips: float = 0.0,
    steps: Sequence[int] = (2, 3),
    largest: int = LARGEST,
) -> list[State]:
    """Return conversations about questions of the train side, to warm up a model. hasty, slips: as in tasks.wordmath."""
    rng = random.Random(f"calculator {seed}")
    problems = (draw_from("train", rng, steps, largest) for _ in range(count))
    return [conversation(problem, rng, hasty, slips) for problem in problems]


class Calculator(Wordmath):
    """steps: the fewest and the most calls of an answer. others: arguments of `Wordmath`. An episode that runs out of
    turns has no answer."""

    def __init__(
        self,
        steps: tuple[Steps, Steps] = (2, 3),
        largest: Annotated[int, Range(LARGEST)] = LARGEST,
        rewards: Functions = ("correct",),
        weights: Weights = None,
        **others: Any,
    ) -> None:
        super().__init__(steps, largest=largest, rewards=rewards, weights=weights, **others)

    def demonstration(self, example: Example) -> list[Message]:
        """Return a call for each line of the worked solution, with its result, and the box."""
        *lines, box = example["solution"].split("\n")
        return [*chain(*(called(line.partition("=")[0]) for line in lines)), Message("assistant", box)]

    def build(self, example: Example) -> ToolEnv:
        return ToolEnv(self.messages(example), [calculator])

    def graded_part(self, trajectory: Trajectory) -> Trajectory:
        return in_time(trajectory)
