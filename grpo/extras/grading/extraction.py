"""Extracts the answer that a completion claims: a box, the text after ####, or what a reader would take for it."""

import re

from grpo.env.thoughts import after_thoughts
from grpo.extras.grading.spelling import SPECIAL

MAX_LENGTH = 1000  # characters of an answer worth reading; longer ones are loops, and some take minutes

_BRACE = re.compile(r"\\f?box(?:ed)?(?:\s*\{| *(-?[0-9][0-9.,/]{0,99}))|\\\\(?![a-z])|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####+([^\n#]+)")


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, the innermost of nested ones.

    Empty, unclosed and overlong boxes do not count. `\\boxed 7` is TeX too, and occurs in MATH.
    """
    answer, latest = None, -1
    opened: list[tuple[int, bool]] = []  # the braces that are open, and whether each is a box
    for match in _BRACE.finditer(text):
        if match[1]:
            answer, latest = match[1], match.start()
        elif match[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > latest:
                latest = start
                if match.start() - start <= MAX_LENGTH:
                    answer = text[start : match.start()].strip() or answer
        elif match[0][-1] == "{" and match[0] != "\\{":
            opened.append((match.end(), match[0] != "{"))
    return answer


def extract_answer(text: str) -> str | None:
    """Return the answer that a completion claims: after the last `</think>`, the last box, else the last `#### ...`; else None.

    The last one counts, so that a corrected answer is judged by its correction. An unclosed <think> claims nothing yet.
    """
    text = after_thoughts(text)
    if (answer := boxed(text)) is not None:
        return answer
    for line in reversed(_HASHES.findall(text)):  # the text after <|eot_id|> is another turn
        answer = next(filter(None, map(str.strip, SPECIAL.split(line))), "")
        if 0 < len(answer) <= MAX_LENGTH and answer.strip("*_ "):
            return answer
    return None


# inline mathematics, as Markdown delimits it (not "$18 and $20"), or a number
_LOOSE = re.compile(
    r"\$(?![\s$])([^$\n]{1,200}?)(?<!\s)\$(?!\d)|\\\((.{1,200}?)\\\)"
    r"|((?<![\w.)}])-)?(?<!\w)(?<!\d\.)((?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?%?)"
)


def loose_answer(text: str) -> str | None:
    """Return the text that a reader would take for the answer: the result of `extract_answer`, else the last box, else the
    last formula or number, anywhere in the text."""
    if (answer := extract_answer(text) or boxed(text)) is not None:
        return answer
    matches = [*_LOOSE.finditer(text)]
    if not matches:
        return None
    dollars, parentheses, sign, number = matches[-1].groups()
    formula = dollars or parentheses
    return formula.strip() if formula else (sign or "") + number
