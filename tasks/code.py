"""Write a Python program that passes tests: rows in the form of HumanEval (arXiv 2107.03374) or MBPP (arXiv 2108.07732), or with
cases, as those of APPS (arXiv 2105.09938), TACO (arXiv 2312.14852) and LiveCodeBench (arXiv 2403.07974)."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from grpo.env.messages import Message
from grpo.env.types import Example, Reward, Split, Trajectory
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.programs.cases import Case, cases_of
from grpo.extras.programs.elsewhere import run_in
from grpo.extras.programs.programs import code_verdict
from grpo.extras.programs.sandbox import ProgramLimits, run_program
from grpo.rewards.combined import Weights, text_of
from grpo.rewards.resolve import Functions, imported
from grpo.rewards.row_task import RowTask, chosen, with_answer
from grpo.system.errors import UserError
from grpo.system.ranges import Range, Seconds, as_yaml

FENCE = "```python\n"
FUNCTION = re.compile(r"\S+\.py:\w+")


def passes(
    completions: Sequence[Any],
    continuation: Sequence[bool] | None = None,
    seconds: Seconds = 10.0,
    memory_mb: Annotated[int, Range(64)] = 512,
    unconfined: bool = False,
    sandbox: str | None = None,
    **columns: Any,
) -> list[Reward]:
    """1 for a program that passes all tests of its row within the limits, NaN if the tests cannot run; see `code_verdict`.

    Parts: program_timeout, and tricks, 1 for a program with the marks of a trick, which changes no reward.
    unconfined: run it even if the machine can only limit time and memory. sandbox: where programs run, a command that starts
    grpo.extras.programs.elsewhere there, or FILE.py:NAME of a function in place of `run_program`; None: on this machine.
    """
    limits = ProgramLimits(seconds=seconds, memory_mb=memory_mb)
    run = run_program
    if sandbox:
        run = imported(sandbox, "sandbox") if FUNCTION.fullmatch(sandbox) else run_in(sandbox)
    rewards = []
    for i, completion in enumerate(completions):
        row = {name: values[i] for name, values in columns.items() if isinstance(values, list)}
        continues = bool(continuation and continuation[i])
        verdict = code_verdict(text_of(completion), row, limits, continues, unconfined, run)
        right = verdict.outcome == "right"
        value = float("nan") if verdict.outcome in ("timeout", "error") else float(right)
        ending = verdict.result.ending if verdict.result else None
        parts = {"program_timeout": float(ending == "timeout"), "tricks": float(bool(verdict.marks))}
        rewards.append(Reward(value, right, parts, verdict.outcome))
    return rewards


def chat(row: Example) -> str:
    """Return the question of a chat model: the function to complete, or the text of an MBPP row with its tests."""
    if "entry_point" in row:
        return f"Complete this function. Give the whole of it in a ```python block.\n\n{FENCE}{row['prompt']}```"
    return f"{_mbpp(row)}\n\nGive the function in a ```python block."


def base(row: Example) -> str:
    """Return the prompt of a base model: the code to continue."""
    return row["prompt"] if "entry_point" in row else f"{_mbpp(row)}\n\n{FENCE}"


def _mbpp(row: Example) -> str:
    tests = row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise UserError(f"test_list={as_yaml(tests)[:80]} must be a list of texts, each an assert")
    tests = "\n".join(tests)
    return f"{row['prompt']} Your code should pass these tests:\n\n{tests}"


class Code(RowTask):
    """prompt: chat, or base, a text that a base model continues. rows: further arguments of `Dataset`."""

    gold_column = None

    def __init__(
        self,
        path: str,
        prompt: str = "chat",
        rewards: Functions = "tasks.code.passes",
        weights: Weights = None,
        solved: float = 1.0,
        **rows: Any,
    ) -> None:
        self.template = chosen({"chat": chat, "base": base}, prompt)
        super().__init__(Dataset(path, ("prompt",), "", **rows), rewards, weights, solved)

    def examples(self, split: Split) -> Sequence[Example]:
        rows = super().examples(split)
        if not {"test_list", "entry_point"} & rows[0].keys():
            needed = "HumanEval's prompt, entry_point and test, or MBPP's prompt, test_imports and test_list"
            raise UserError(f"the rows of the code task have {', '.join(rows[0])}: they need {needed}")
        return rows

    def messages(self, example: Example) -> tuple[Message, ...]:
        return (Message("user", self.template(example)),)

    def score_group(self, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward]:
        continuation = self.template is base and "entry_point" in example
        if self.template is base and not continuation:
            # the prompt has opened the fence
            trajectories = [with_answer(trajectory, FENCE + trajectory.answer) for trajectory in trajectories]
        return super().score_group({**example, "continuation": continuation}, trajectories)


class Cases(RowTask):
    """Programs that read standard input, or functions (a row with `starter_code`), judged by the cases of the row.

    question: the column with the text. cases: the columns with the cases, in a form that `cases_of` reads. A row whose cases
    cannot be read has an unknown reward. rows: further arguments of `Dataset`.
    """

    gold_column = None

    def __init__(
        self,
        path: str,
        question: str,
        cases: Sequence[str],
        rewards: Functions = "tasks.code.passes",
        weights: Weights = None,
        solved: float = 1.0,
        **rows: Any,
    ) -> None:
        self.question, self.cases = question, tuple(cases)
        super().__init__(Dataset(path, (question, *self.cases), "", **rows), rewards, weights, solved)

    def check(self, row: Example, where: str) -> None:
        super().check(row, where)
        columns = ", ".join(self.cases)
        try:
            cases = self.cases_in(row)
        except ValueError as error:
            raise UserError(f"{where}: the cases in {columns} cannot be read ({error}); see docs/grading.md") from error
        if not cases:
            raise UserError(f"{where}: there is no case in {columns}; see docs/grading.md")

    def messages(self, example: Example) -> tuple[Message, ...]:
        if (code := example.get("starter_code") or "").strip():
            how = f"Complete this code. Give the whole of it in a ```python block.\n\n{FENCE}{code}\n```"
        else:
            how = "Write a Python program that reads standard input and prints its answer."
            how += " Give it in a ```python block."
        return (Message("user", f"{example[self.question]}\n\n{how}"),)

    def cases_in(self, row: Example) -> list[Case]:
        """Return the cases of a row. Columns `inputs` and `outputs` count as one. Raises ValueError if they cannot be read."""
        columns = {name: row[name] for name in self.cases}
        whole = {"inputs", "outputs"} <= columns.keys()
        return cases_of([columns] if whole else columns.values(), row.get("metadata"))

    def columns(self, example: Example) -> Example:
        try:
            return {**example, "cases": self.cases_in(example)}
        except ValueError:
            return {**example, "cases": []}
