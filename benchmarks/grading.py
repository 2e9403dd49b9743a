"""Measure how fast answers are graded, and how much an endless one delays the others.

    python benchmarks/grading.py D          # D has gsm8k_test.jsonl and math500_test.jsonl

Prints answers per second on GSM8K's own solutions (one by one, and in groups of 8 as a run scores them, with no cache between
rounds), seconds for 64 answers that need algebra, without and with an endless one among them (medians of three rounds), and the
time of one grading: median, 99 % and slowest, of MATH-500's answers against their own gold and another one, and of the tests'
cases.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1]))
import grading_table

from grpo.env.messages import Message
from grpo.env.types import Action, State, Step, Trajectory
from grpo.extras.grading import grading
from grpo.rollout.rewarding import Scorer
from tasks.gsm8k import GSM8K

ENDLESS = "\\boxed{\\ln(10^{10^{10}})}"


def said(text: str) -> Trajectory:
    return Trajectory((Step(State((Message("user", "?"),)), Action(Message("assistant", text))),))


def seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(3):
        grading._decide.cache_clear()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def main(folder: str) -> None:
    task = GSM8K(folder)
    rows = [(row, said(row["answer"])) for row in task.examples("test")]
    grading.verdict("x+1", "1+x")  # starts a worker

    def one_by_one() -> None:
        for row, trajectory in rows:
            assert task.score(row, trajectory).correct

    def in_groups(pairs: list, group: int) -> list[str | None]:
        async def scored() -> list:
            score = Scorer(task, 60)
            return await asyncio.gather(*(score(row, [trajectory] * group) for row, trajectory in pairs))

        found = asyncio.run(scored())
        assert not any(error for _, error in found)
        return [rewards[0].outcome for rewards, _ in found]

    print(f"GSM8K, one by one: {len(rows) / seconds(one_by_one):,.0f} answers per second")
    print(f"GSM8K, groups of 8: {8 * len(rows) / seconds(lambda: in_groups(rows, 8)):,.0f} answers per second")

    lines = (Path(folder) / "math500_test.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    pairs = [
        ({"question": "?", "answer": gold}, said(f"\\boxed{{{other}}}"))
        for gold, other in pairwise(golds)
        if grading.equal(other, gold) is None  # exact arithmetic cannot decide
    ][:64]
    poisoned = [*pairs[:63], ({"question": "?", "answer": "4"}, said(ENDLESS))]
    outcomes = {}

    def graded(name: str, pairs: list) -> None:
        outcomes[name] = in_groups(pairs, 1)

    clean, endless = (
        seconds(lambda n=name, p=p: graded(n, p)) for name, p in (("clean", pairs), ("poisoned", poisoned))
    )
    print(
        f"64 answers for algebra: {clean:.2f} s; one of them endless: {endless:.2f} s (deadline {grading.DEADLINE} s)"
    )
    assert outcomes["poisoned"][63] == "timeout" and outcomes["poisoned"][:63] == outcomes["clean"][:63]
    one_at_a_time("MATH-500, answers and others", [*zip(golds, golds, strict=True), *pairwise(golds)])
    one_at_a_time("cases of the tests", cases())


def cases() -> list[tuple[str, str]]:
    """Return (answer, gold) of every case in the tables of the tests."""
    tables = [Path(__file__).parents[1] / f"tests/data/grading_{name}.txt" for name in ("right", "wrong")]
    lines = [line.split(" ~ ") for table in tables for line in table.read_text(encoding="utf-8").splitlines()]
    rules = [(a, gold) for _, gold, answers in grading_table.cases() for a in answers["right"] + answers["wrong"]]
    return [(answer, gold) for gold, *answers in lines for answer in answers] + rules


def one_at_a_time(name: str, pairs: list[tuple[str, str]]) -> None:
    grading._decide.cache_clear()
    times = []
    for answer, gold in pairs:
        start = time.perf_counter()
        grading.verdict(answer, gold)
        times.append(1000 * (time.perf_counter() - start))
    print(
        f"{name}: {len(pairs)} gradings, median {median(times):.3f} ms, 99 % under {quantiles(times, n=100)[98]:.0f} ms, "
        f"slowest {max(times):.0f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1])
