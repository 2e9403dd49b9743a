"""Count the attempts of tests/data/attempts.jsonl that are paid, and measure the cost of grading a program.

    python benchmarks/attacks.py DATA                    DATA: a folder with humaneval_20.jsonl and mbpp_sanitized_30.jsonl
    PYTHONPATH=OTHER python benchmarks/attacks.py DATA   the same with the graders of another checkout

Each attack on programs is tried on every row. The cost is the median of the reference solutions, and of them all together.
"""

import ast
import json
import re
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from helpers.attempts import ATTEMPTS, CODE, graded, outcome, programs  # noqa: E402


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def name_of(row: dict) -> str:
    return (
        row.get("entry_point") or re.search(r"(\w+)\(", re.sub(r"assert|math\.isclose|\(", "(", row["test_list"][0]))[1]
    )


def asserts(row: dict) -> list[str]:
    """Return the form of each assert: a call compared with a literal, another expression of one call, or another."""
    found = []
    for node in ast.walk(ast.parse("\n".join(row.get("test_list", ())) or row["test"])):
        if isinstance(node, ast.Assert):
            test = node.test
            literal = (
                isinstance(test, ast.Compare) and isinstance(test.left, ast.Call) and isinstance(test.ops[0], ast.Eq)
            )
            calls = [
                one for one in ast.walk(test) if isinstance(one, ast.Call) and getattr(one.func, "id", "") != "abs"
            ]
            plain = not any(isinstance(one, (ast.Lambda, ast.Name)) for call in calls for one in call.args)
            found.append(
                "call == literal" if literal and len(calls) == 1 else "other" if not plain else "expression of a call"
            )
    return found


def paid(attack: str, real: list[dict]) -> int:
    with ThreadPoolExecutor(2) as pool:
        return sum(
            got == "right" for got in pool.map(lambda row: outcome(attack.replace("NAME", name_of(row)), row), real)
        )


def main() -> None:
    humaneval, mbpp = (rows(Path(sys.argv[1]) / f"{name}.jsonl") for name in ("humaneval_20", "mbpp_sanitized_30"))
    for row in humaneval:
        row["code"] = row["prompt"] + row["canonical_solution"]
    for name, real in (("HumanEval", humaneval), ("MBPP", mbpp)):
        forms = [form for row in real for form in asserts(row)]
        print(name, {form: forms.count(form) for form in sorted(set(forms))})
    print(f"\n{'attacks on programs: rows paid of':66}{len(humaneval):5}{len(mbpp):5}")
    for row in ATTEMPTS:
        if row["grader"] == "code" and row["verdict"] == "wrong":
            hits = paid(row["attempt"], humaneval), paid(row["attempt"], mbpp)
            if any(hits):
                print(f"{row['note']:66}{hits[0]:5}{hits[1]:5}", flush=True)
    print("\nattempts that get another verdict than they should, and their number")
    for grader in sorted({row["grader"] for row in ATTEMPTS} - {"code"}):
        of = [row for row in ATTEMPTS if row["grader"] == grader]
        print(f"{grader:20}{sum(graded(row) != row['verdict'] for row in of):5}{len(of):5}")
    print(
        f"{'code':20}{sum(outcome(one[2], CODE[one[1]]) != one[3] for one in programs(True)):5}{len(programs(True)):5}"
    )
    seconds, before = [], resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        for row in (*humaneval, *mbpp):
            began = time.perf_counter()
            assert outcome(row["code"], row) == "right"
            seconds.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(seconds)
    print(f"\n{median(seconds) * 1e3:.1f} ms a program (median of {len(seconds)}), {cpu * 1e3:.1f} ms of processor")


if __name__ == "__main__":
    main()
