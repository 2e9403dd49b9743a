"""Grades a program: from a completion and a row of HumanEval or MBPP to a `Verdict`."""

import re
from dataclasses import dataclass

from grpo.env.types import Example, Outcome
from grpo.rewards.code.sandbox import ProgramLimits, Result, run_program
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
    for line in text.rpartition("</think>")[2].splitlines():
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
    body = _STOP.split(text, maxsplit=1)[0]
    return body if body.strip() else None


def bare_program(text: str, row: Example) -> str | None:
    """Return a completion without fences that looks like pure code: a function, or the body of a HumanEval prompt."""
    text = text.rpartition("</think>")[2].strip("\n")
    is_body = "entry_point" in row and text[:1] in (" ", "\t")
    return text if "```" not in text and (is_body or _FUNCTION.search(text)) else None


def assemble(row: Example, code: str) -> str:
    """Return a program that runs to its end if `code` is right, from HumanEval's columns, or those of (sanitized) MBPP.

    HumanEval: the prompt, then `code` (the body, or a whole function that replaces the prompt's, which is complete with its
    docstring alone; the prompt's imports and helpers stay), then check(entry_point).
    MBPP: imports, `code`, assertions.
    """
    code += "\n"  # an empty line keeps a last backslash from joining `code` with the first test
    if "entry_point" in row:
        return f"{row['prompt']}{code}\n{row['test']}\ncheck({row['entry_point']})\n"
    if "test_list" in row:
        return "\n".join([*row.get("test_imports", ()), code, *row["test_list"]]) + "\n"
    raise UserError(f"columns {sorted(row)}: need HumanEval's (prompt, entry_point, test) or MBPP's (test_list)")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a completion. `result.ending` distinguishes wrong answers: "timeout" may be an endless loop."""

    outcome: Outcome
    result: Result | None = None  # None for no answer


def code_verdict(
    text: str, row: Example, limits: ProgramLimits | None = None, continuation: bool = False, unconfined: bool = False
) -> Verdict:
    """Run a completion's program against its row's tests. continuation: the text continues a HumanEval prompt.

    A program that exceeds its time, memory or disk is wrong, because the policy wrote it: if such samples were masked, an
    endless loop on a hard problem would cost nothing, and be worth more than an honest failure. No program can cause the
    outcome "timeout": the machine never reached its first line.
    """
    code = extract_continuation(text) if continuation else extract_program(text) or bare_program(text, row)
    if code is None:
        return Verdict("no_answer")
    result = run_program(assemble(row, code), limits, unconfined)
    return Verdict({"passed": "right", "unstarted": "timeout"}.get(result.ending, "wrong"), result)
