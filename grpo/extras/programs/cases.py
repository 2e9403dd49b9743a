"""Programs judged by cases: an input, and the output that a right program gives for it, as in APPS, TACO and LiveCodeBench.

A case is a text on standard input and the text that the program must print, or the arguments of a function and its result. The
expected text never enters the sandbox of a script: this process compares it with what the script printed.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from grpo.extras.programs.sandbox import ProgramLimits, Result, UnitTests, run_program

UNPACKED = 1 << 30  # bytes of packed cases at most
# what the starter code of such rows takes for granted; Python's own names come last, since math has another pow
IMPORTS = ["typing", "collections", "heapq", "bisect", "itertools", "functools", "string", "re", "math", "builtins"]
PRELUDE = "".join(f"import {name}\nfrom {name} import *\n" for name in IMPORTS)


@dataclass(frozen=True)
class Case:
    """One case. input: the text on standard input, or the arguments of `function`. expected: what the script must print, or the
    results that the function may return."""

    input: Any
    expected: Any
    function: str | None = None


def cases_of(columns: Iterable[Any], metadata: Any = None) -> list[Case]:
    """Return the cases in the columns of a row. A column is one of these, or it as JSON, or packed as in LiveCodeBench:

        {"inputs": [...], "outputs": [...], "fn_name": NAME}        APPS, TACO, PRIME; without fn_name for scripts
        [{"input": ..., "output": ..., "testtype": "stdin"}, ...]   LiveCodeBench, DeepCoder, Codeforces

    metadata: LiveCodeBench's, which names the function of "functional" cases. Raises ValueError for anything else.
    """
    try:
        name = (_opened(metadata) or {}).get("func_name")
        return [_case(*fields, name) for column in columns for fields in _rows(_opened(column))]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"these are no cases: {error}") from error


def _rows(column: Any) -> Iterable[tuple[Any, Any, str | None, bool]]:
    """Yield the input, the output, the function's name and whether there is one, of each case in a column."""
    if isinstance(column, Mapping):
        inputs = column.get("inputs", column.get("input"))
        outputs = column.get("outputs", column.get("output"))
        name = column.get("fn_name")
        yield from ((x, y, name, bool(name)) for x, y in zip(inputs, outputs, strict=True))
    else:
        for case in column or ():
            kind = case.get("testtype") or case.get("type")
            yield case["input"], case["output"], case.get("fn_name"), kind in ("functional", "function_call")


def _case(x: Any, y: Any, name: str | None, called: bool, usual: str | None) -> Case:
    """Return the case of an input x and its output y. usual: the name of a function that is called and has none."""
    if not called:
        return Case(_text(x), _text(y))
    if not (name or usual):
        raise KeyError("no name of the function that they call")
    if isinstance(x, str):  # a JSON value a line, in LiveCodeBench
        return Case([json.loads(line) for line in x.split("\n")], [json.loads(y)], name or usual)
    wrapped = y[:1] if isinstance(y, list) else []  # a result may be in a list of one, in APPS
    return Case(x, [y, *wrapped], name or usual)


def _text(value: Any) -> str:
    """Return a text; a list is its lines."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"packed cases name {module}.{name}: only a text is read")


def _opened(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except ValueError as error:
        try:
            packed = zlib.decompressobj().decompress(base64.b64decode(value, validate=True), UNPACKED)
            return json.loads(_TextOnly(io.BytesIO(packed)).load())
        except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError):
            raise error from None


def same_output(printed: str, expected: str) -> bool:
    """Return whether an output is the one expected, by LiveCodeBench's rule: as many lines, and each of them equal, or equal as
    decimal numbers separated by blanks, exactly (1.50 is 1.5, and 0.333 is not 1/3). Blanks at both ends of a line, and blank
    lines at both ends of the output, do not count."""
    lines, right = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    if len(lines) != len(right):
        return False
    return all(a == b or _same_numbers(a, b) for a, b in zip(lines, right, strict=True))


def _same_numbers(printed: str, expected: str) -> bool:
    try:
        numbers, right = ([Decimal(word) for word in line.split()] for line in (printed, expected))
    except InvalidOperation:
        return False
    return all(number.is_finite() for number in numbers) and numbers == right


_CALL = """
nan, inf = float("nan"), float("inf")
def plain(x):
    return [plain(item) for item in x] if isinstance(x, (list, tuple)) else x
result = plain({call}(*{arguments!r}))
assert any(result == right for right in {expected!r}), "another result"
"""


def _call(program: str, case: Case) -> tuple[str, UnitTests]:
    """Return the program and the test that calls its function."""
    name = "Solution" if "class Solution" in program else case.function  # LiveCodeBench's rule
    call = f"Solution().{case.function}" if name == "Solution" else name
    before = "" if "__future__" in program else PRELUDE
    test = _CALL.format(call=call, arguments=case.input, expected=case.expected)
    return before + program, UnitTests(test, (name,))


def run_case(
    program: str, case: Case, limits: ProgramLimits, unconfined: bool = False, run: Callable[..., Result] = run_program
) -> Result:
    """Run a program on one case, with the limits for itself. Its ending is "passed" if it is right, else the reason. run: see
    `code_verdict`."""
    if case.function:
        program, tests = _call(program, case)
        return run(program, limits, unconfined, tests)
    whole = replace(limits, output=limits.disk_mb << 20)  # all that it prints is compared
    result = run(program, whole, unconfined, stdin=case.input)
    wrong = result.passed and not same_output(result.stdout, case.expected)
    end = result.stdout[-limits.output :] if limits.output else ""
    return replace(result, ending="failed" if wrong else result.ending, stdout=end)
