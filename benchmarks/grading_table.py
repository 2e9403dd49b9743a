"""Print what is equal to what, as tables: the cases that the tests hold (tests/data/grading_rules.txt).

    python benchmarks/grading_table.py

It also grades the pairs of tests/data/grading_pairs.txt, like and unlike answers of all sorts, and counts those as wanted.

A rule is a line `# Rule: what it says`, and the lines below it are its cases. A case is a right answer with answers that equal it
(`~`) or do not (`≠`): `1/2 ~ 0.5 ~ .5 ≠ 2`.
"""

import re
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo.extras.grading.grading import verdict

ROOT = Path(__file__).parents[1]
CASES, PAIRS = (ROOT / f"tests/data/grading_{name}.txt" for name in ("rules", "pairs"))


def cases(file: Path = CASES) -> list[tuple[str, str, dict[str, list[str]]]]:
    """Return (rule, gold, answers that are right or wrong) of a file."""
    rule, found = "", []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            rule = line[2:]
        else:
            gold, *rest = re.split(" ([~≠]) ", line)
            answers = [*zip(rest[::2], rest[1::2], strict=True)]
            verdicts = {"right": "~", "wrong": "≠"}
            found.append(
                (rule, gold, {name: [a for sign, a in answers if sign == verdicts[name]] for name in verdicts})
            )
    return found


def table() -> str:
    """Return the cases as Markdown: a table for each rule."""
    parts = []
    for rule, golds in groupby(cases(), key=lambda case: case[0]):
        name, _, says = rule.partition(": ")
        parts.append(f"**{name}.** {says}.\n\n| gold | right | wrong |\n|---|---|---|\n")
        parts += [
            f"| {_code([gold])} | {_code(answers['right'])} | {_code(answers['wrong'])} |\n"
            for _, gold, answers in golds
        ]
        parts.append("\n")
    return "".join(parts)


def _code(texts: list[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts).replace("|", "\\|")


def main() -> None:
    print(table())
    for wanted, name in (("right", "like"), ("wrong", "unlike")):
        pairs = [(answer, gold) for _, gold, answers in cases(PAIRS) for answer in answers[wanted]]
        print(f"{len(pairs)} pairs of {name} answers, {wanted}:", sum(verdict(*pair) == wanted for pair in pairs))


if __name__ == "__main__":
    main()
