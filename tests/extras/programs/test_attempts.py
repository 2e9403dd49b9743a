"""Attempts to be paid without solving, one for each line of tests/data/attempts.jsonl, with the verdict that each must get."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import REAL_DATA
from helpers.attempts import ATTEMPTS, CODE, confinable, graded, outcome, programs
from helpers.rows import read

from grpo.extras.grading.answers import boxed
from grpo.extras.grading.worked import copied, unworked
from grpo.extras.programs.programs import assemble

real = pytest.mark.skipif(not (REAL_DATA / "mbpp_sanitized_30.jsonl").is_file(), reason="no real rows on this machine")


def test_there_are_many_attempts():
    assert len(ATTEMPTS) >= 150 and len({json.dumps(row) for row in ATTEMPTS}) == len(ATTEMPTS)


@pytest.mark.parametrize("grader", sorted({row["grader"] for row in ATTEMPTS} - {"code"}))
def test_attempts_to_be_paid_without_solving(grader):
    attempts = [row for row in ATTEMPTS if row["grader"] == grader]
    with ThreadPoolExecutor(
        4 if grader == "correct" else 1
    ) as pool:  # algebra has workers; datasets are read by one thread
        verdicts = list(pool.map(graded, attempts))
    assert [(row, got) for row, got in zip(attempts, verdicts, strict=True) if got != row["verdict"]] == []


def judged(cases: list[tuple[str, str, str, str]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda case: outcome(case[2], CODE[case[1]]), cases))
    assert [(case, got) for case, got in zip(cases, verdicts, strict=True) if got != case[3]] == []


needs_sandbox = pytest.mark.skipif(not confinable(), reason="the platform cannot confine a program")


@needs_sandbox
@pytest.mark.slow
def test_programs_that_deceive_their_tests():
    judged(programs(every=False))


@needs_sandbox
@pytest.mark.slow
def test_programs_that_deceive_both_forms_of_tests():
    judged(programs(every=True))


@needs_sandbox
@real
@pytest.mark.slow
def test_programs_that_deceive_real_tests():
    wrong = [(note, program) for note, _, program, verdict in programs(every=False) if verdict == "wrong"]
    cases = [
        (note, program.replace("scaled", assemble(row, "")[1].names[0]), row)
        for row in (*read(REAL_DATA / "humaneval_20.jsonl"), *read(REAL_DATA / "mbpp_sanitized_30.jsonl"))
        for note, program in wrong
    ]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda case: outcome(case[1], case[2]), cases))
    assert [case for case, got in zip(cases, verdicts, strict=True) if got == "right"] == []


@real
def test_no_solution_of_math_counts_as_left_to_the_grader():
    for row in read(REAL_DATA / "math500_test.jsonl"):
        answer = boxed(row["solution"])
        assert not unworked(answer, row["answer"]) and not copied(answer, row["answer"], row["problem"]), row["answer"]
