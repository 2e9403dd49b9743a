"""Grades a program: from a completion and a row with unit tests (HumanEval, MBPP) or cases (see `cases`) to a `Verdict`."""

import ast
import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass

from grpo.env.thoughts import after_thoughts
from grpo.env.types import Example, Outcome
from grpo.extras.programs.cases import run_case
from grpo.extras.programs.sandbox import ProgramLimits, Result, UnitTests, run_program
from grpo.extras.programs.tricks import tricks
from grpo.system.errors import UserError

_FENCE = re.compile(r"([ \t]*)(`{3,})[ \t]*([^\s`]*)[^`]*")
_FUNCTION = re.compile(r"^(?:async )?def \w", re.MULTILINE)
_STOP = re.compile(r"\n(?:class|def|#|if|print)")  # HumanEval, arXiv 2107.03374 sec. 2.2


def extract_program(text: str) -> str | None:
    """Return the last block fenced as ```python after the last `</think>`, else the last one fenced without a language.

    None if there is none, if it is empty, or if the text ends inside a block, which is then incomplete.
    """
    blocks: dict[bool, str] = {}  # named python? -> the last such block
    opened = None
    for line in re.split(r"\r?\n", after_thoughts(text)):  # a string in a program may have other separators
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence:
                opened, lines = fence, []
        elif fence and not fence[3] and len(fence[2]) >= len(opened[2]):
            language = opened[3].lower()
            if language in ("", "python", "python3", "py"):
                blocks[bool(language)] = "\n".join(lines) + "\n"
            opened = None
        else:
            lines.append(line.removeprefix(opened[1]))  # a fence in a list is indented, and so are its lines
    if opened is not None:
        return None
    program = blocks.get(True, blocks.get(False, ""))
    return program if program.strip() else None


def extract_continuation(text: str) -> str | None:
    """Return the body that a base model writes after a HumanEval prompt: up to the next statement at the top level."""
    body = _STOP.split(after_thoughts(text), maxsplit=1)[0]
    return body if body.strip() else None


def bare_program(text: str, row: Example) -> str | None:
    """Return a completion without fences that looks like pure code: a function, or the body of a HumanEval prompt."""
    text = after_thoughts(text).strip("\n")
    is_body = "entry_point" in row and text[:1] in (" ", "\t")
    return text if "```" not in text and (is_body or _FUNCTION.search(text)) else None


def assemble(row: Example, code: str) -> tuple[str, UnitTests]:
    """Return a program and its tests, from HumanEval's columns, or those of (sanitized) MBPP.

    HumanEval: the program is the prompt, then `code` (the body, or a whole function that replaces the prompt's; the prompt's
    imports and helpers stay). The tests are check(entry_point), and have the prompt's helpers, not the program's.
    MBPP: the program is imports and `code`; the tests are assertions. The names in them that neither the tests nor Python define
    are the program's functions; if there are none, the names that the tests call, which are Python's own (`sum`).
    Raises SyntaxError for tests that are no Python.
    """
    if "entry_point" in row:
        name = row["entry_point"]
        tests = UnitTests(f"{row['test']}\ncheck({name})\n", (name,), f"{row['prompt']}\n    pass\n")
        return f"{row['prompt']}{code}\n", tests
    if "test_list" in row:
        imports = "\n".join(row.get("test_imports", ()))
        text = "\n".join(row["test_list"])
        return f"{imports}\n{code}\n", UnitTests(text, functions_of(f"{imports}\n{text}"), imports)
    raise UserError(f"columns {sorted(row)}: need HumanEval's (prompt, entry_point, test), MBPP's (test_list) or cases")


def functions_of(tests: str) -> tuple[str, ...]:
    """Return the names that tests use and do not define: the functions of the program."""
    nodes = list(ast.walk(ast.parse(tests)))
    used, called, defined = set(), set(), set()
    for node in nodes:
        match node:
            case ast.Name(id=name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(name)
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
            case (
                ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=name)
            ):
                defined.add(name)
            case ast.alias():
                defined.add((node.asname or node.name).partition(".")[0])
    free = sorted(used - defined)
    not_pythons = tuple(name for name in free if not hasattr(builtins, name))
    return not_pythons or tuple(name for name in free if name in called)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a completion. `result.ending` distinguishes wrong answers: "timeout" may be an endless loop.

    marks: the kinds of tricks that the program may have tried (see `tricks`), whatever the outcome.
    """

    outcome: Outcome
    result: Result | None = None  # None for no answer
    marks: tuple[str, ...] = ()


def code_verdict(
    text: str,
    row: Example,
    limits: ProgramLimits | None = None,
    continuation: bool = False,
    unconfined: bool = False,
    run: Callable[..., Result] = run_program,
) -> Verdict:
    """Run a completion's program with its row's tests, which run in another process, or on its cases, each in a process of its
    own with the whole limits, up to the first that it fails. continuation: the text continues a HumanEval prompt. run: runs a
    program in place of `run_program`, with the same parameters.

    A program that exceeds its time, memory or disk is wrong, because the policy wrote it: if such samples were masked, an
    endless loop on a hard problem would cost nothing, and be worth more than an honest failure. No program can cause the
    outcome "timeout", where the machine never reached its first line, or "error", where the tests are no Python or cannot be run
    from outside the program, or the row has no cases that can be read.
    """
    code = extract_continuation(text) if continuation else extract_program(text) or bare_program(text, row)
    if code is None:
        return Verdict("no_answer")
    limits, names, result = limits or ProgramLimits(), (), None
    if "cases" in row:
        for case in row["cases"]:
            result = run_case(code, case, limits, unconfined, run)
            if not result.passed:
                break
    else:
        try:
            code, tests = assemble(row, code)
        except SyntaxError:
            return Verdict("error")
        names, result = tests.names, run(code, limits, unconfined, tests)
    ending = result.ending if result else None
    outcomes = {"passed": "right", "unstarted": "timeout", "untestable": "error", None: "error"}
    outcome = outcomes.get(ending, "wrong")
    return Verdict(outcome, result, tuple(sorted(tricks(code, names))))
