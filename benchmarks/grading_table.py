"""Write the table of docs/grading.md, what is equal to what, from the cases that the tests hold (tests/data/grading_rules.txt).

    python benchmarks/grading_table.py

A rule is a line `# Rule: what it says`, and the lines below it are its cases. A case is a right answer with answers that equal it
(`~`) or do not (`≠`): `1/2 ~ 0.5 ~ .5 ≠ 2`.
"""

import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES, PAGE = ROOT / "tests/data/grading_rules.txt", ROOT / "docs/grading.md"
BEGIN, END = "<!-- cases: python benchmarks/grading_table.py -->\n", "<!-- end of cases -->\n"


def cases() -> list[tuple[str, str, dict[str, list[str]]]]:
    """Return (rule, gold, answers that are right or wrong)."""
    rule, found = "", []
    for line in CASES.read_text(encoding="utf-8").splitlines():
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
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
