"""Attempts to be paid without solving, and the verdict on each. The data are one attempt a line, of a policy against a grader.

`verdict` is the outcome that it must get, or the value of a reward function. Lines called honest show that the graders still pay
for answers; those called known are paid, and the documentation says so.
"""

from functools import cache
from pathlib import Path

from grpo.env.messages import Message, ToolCall
from grpo.extras.grading import functions
from grpo.extras.programs.programs import code_verdict
from grpo.extras.programs.sandbox import ProgramLimits, confinement
from grpo.rewards.combined import Rewards
from grpo.system.errors import UserError
from helpers.episodes import played, said
from helpers.rows import read
from tasks.calculator import Calculator
from tasks.countdown import Countdown, form
from tasks.musique import Musique

DATA = Path(__file__).parents[1] / "data"
ATTEMPTS = read(DATA / "attempts.jsonl")
LIMITS = ProgramLimits(seconds=2)
CODE = {
    "mbpp": {
        "test_imports": ["import math"],
        "test_list": [
            "assert scaled([3, 1], 2) == [6, 2]",
            "assert scaled([], 5) == []",
            "assert math.isclose(scaled([0.5], 3)[0], 1.5)",
        ],
    },
    "humaneval": {
        "prompt": 'def doubled(x):\n    return 2 * x\n\n\ndef scaled(values, by):\n    """Multiply each value."""\n',
        "entry_point": "scaled",
        "test": "def check(candidate):\n    assert candidate([2], 3) == [6]\n    for n in range(4):\n"
        "        assert candidate(list(range(n)), 2) == [doubled(i) for i in range(n)]\n"
        "    assert abs(candidate([1.1], 2)[0] - 2.2) < 1e-6\n    assert not candidate([], 1)\n",
    },
    "close": {"test_list": ["import math", "assert math.isclose(scaled([2.0], 3)[0], 6.0)"]},
    "near": {"test_list": ["assert abs(scaled(2.0, 3) - 6.0) < 1e-6"]},
    "sorted": {"test_list": ["assert sorted(scaled([2, 1], 3)) == [3, 6]", "assert set(scaled([2], 3)) == set([6])"]},
    "map": {"test_list": ["for x in map(scaled, [1, 2], [2, 2]): assert x in (2, 4)"]},
    "loop": {"test_list": ["for n in range(1, 4):\n    x = [n]\n    assert scaled(x, 2) == [2 * i for i in x]"]},
}


@cache
def musique() -> Musique:
    return Musique(str(DATA / "musique.jsonl"), splits={"test": "test"})


def message(name: str, arguments: object, text: str = "") -> Message:
    return Message("assistant", text, (ToolCall(name, arguments),))


def graded(row: dict) -> object:
    """Return the verdict on an attempt."""
    attempt, grader = row["attempt"], row["grader"]
    if grader == "correct":
        return functions.correct([attempt], [row["gold"]], prompts=[row["question"]])[0].outcome
    if grader in ("format", "think_answer", "think_levels"):
        return getattr(functions, grader)([attempt])[0]
    if grader == "jsonl":
        return Rewards(["correct", "format"], [1, 0.1]).score({"gold": row["gold"]}, [said(attempt)])[0].value
    if grader == "countdown":
        reward = Countdown().score({"numbers": [3, 7, 25], "target": 46}, said(attempt))
        paid = form([attempt])[0]
        return reward.outcome if paid == row["form"] else f"{reward.outcome}, and {paid} for its form"
    if grader == "musique":
        task = musique()
        example = {**task.examples("test")[0], "answer": row["gold"]}
    else:
        task, example = Calculator(), {"question": "214 and 13 times 42?", "answer": "760"}
    turns = [Message("assistant", one) if isinstance(one, str) else message(**one) for one in attempt]
    return task.score(example, played(task.build(example), *turns, most=9)).outcome


def programs(every: bool) -> list[tuple[str, str, str, str]]:
    """Return (note, form of the tests, program, verdict). Each attempt once, with its forms in turn, or with every form."""
    found = []
    for place, row in enumerate(row for row in ATTEMPTS if row["grader"] == "code"):
        forms = row["gold"].split()
        chosen = forms if every else [forms[place % len(forms)]]
        found += [(row["note"], form, row["attempt"].replace("NAME", "scaled"), row["verdict"]) for form in chosen]
    return found


def outcome(program: str, row: dict) -> str:
    return code_verdict(f"```python\n{program}\n```", row, LIMITS).outcome


def confinable() -> bool:
    """Return whether programs can be confined on this machine."""
    try:
        return bool(confinement())
    except UserError:
        return False
