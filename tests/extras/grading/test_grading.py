"""Grading: extraction of answers, exact arithmetic, algebra, real answers.

The tables, tests/data/grading_*.txt, are `gold ~ answer ~ answer ...`, a line for each kind; they were written by hand.
"""
# ruff: noqa: RUF001 - a policy writes any character

import json
import math
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import grading_table  # benchmarks/grading_table.py
import pytest
from conftest import EXAMPLES, REAL_DATA
from helpers.rows import read

from grpo.extras.grading.answers import clean, equal, extract_answer, sound
from grpo.extras.grading.arithmetic import LARGE, same, value
from grpo.extras.grading.functions import correct
from grpo.extras.grading.grading import unreadable, verdict
from tasks.jsonl import Jsonl

ENDLESS = "\\ln(10^{10^{10}})"  # sympy computes the whole power
real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real answers on this machine")

RIGHT, WRONG = ((EXAMPLES / f"grading_{kind}.txt").read_text() for kind in ("right", "wrong"))
# Right to a reader, but not parsed: text before a number, numbers as words, words beside words.
UNREAD = r"""
5 ~ 5 (five) ~ \approx 5 ~ about 5
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Return (answer, gold) for every answer in a table."""
    lines = [line.split(" ~ ") for line in table.strip().splitlines()]
    return [(answer, gold) for gold, *answers in lines for answer in answers]


def verdicts(questions: list[tuple[str, str]], threads: int = 8) -> list[str]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda question: verdict(*question), questions))


def others(questions: list[tuple[str, str]], wanted: str) -> list[tuple]:
    """Return the questions whose outcome is not the wanted one."""
    return [(*q, got) for q, got in zip(questions, verdicts(questions), strict=True) if got != wanted]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3}, no: \\boxed{4}.", "4"),  # the correction counts
        ("\\boxed{3} or \\boxed{4} or \\boxed{5}", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}, \\fbox{ 8 }", "8"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{1,2\\right.}", "\\left\\{1,2\\right."),
        ("{ \\boxed{3} } }", "3"),
        ("\\boxed{3} put it in \\boxed{}", "3"),
        ("\\boxed{3} or rather \\boxed{4", "3"),
        ("\\boxed{3} or \\boxed{" + "4" * 1001 + "}", "3"),
        ("\\boxed{" + "4" * 1001 + "}", None),
        ("\\boxed{" * 2000 + "4" + "}" * 2000, "4"),
        ("#### 1,000", "1,000"),
        ("####18", "18"),
        ("#### 3\n#### 4", "4"),
        ("#### 42<|im_end|>", "42"),
        ("#### 42</s>\n<|endoftext|>", "42"),
        ("#### 3\n#### <|im_end|>", "3"),
        ("#### \n", None),
        ("\\boxed{7}\n#### 8", "7"),
        ("\\boxed{42}<|im_end|>", "42"),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"),
        ("\\boxed{1}</think> \\boxed{2}", "2"),
        ("<think>\\boxed{1}</think> no idea", None),
        ("<think>\\boxed{1}", None),
        ("<think>a</think><think>\\boxed{1}", None),
        ("\\boxed{}", None),
        ("\\boxed{   }", None),
        ("\\boxed{\\boxed{}}", None),
        ("\\boxed{" * 50000 + "4" * 1001 + "}" * 50000, None),
        ("\\boxed{3", None),
        ("\\boxed 18", "18"),
        ("\\boxed{3}, \\boxed4.", "4."),
        ("\\boxed{\n4\\\\}", "4\\\\"),
        ("\\boxed{3} \\boxed{" + "{" * 2000 + "\\boxed{4}", "4"),
        ("\\\\boxed{4}", "4"),
        ("#### 3 #### 4 ####", "4"),
        ("##### 18", "18"),
        ("<answer>#### 42</answer>", "42"),
        ("#### 42<|eot_id|><|start_header_id|>assistant", "42"),
        ("#### 42\n**####**", "42"),
        ("{" * 50000, None),
        ("The answer is 3", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["\\boxed{", "\\boxed{{", "####", "#### \n", "<think>", "<|", "#### <|", "\\boxed  "])
def test_extraction_is_linear(text):
    start = time.thread_time()
    assert extract_answer(text * 50000) in (None, "<|")
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\\dfrac34", "\\frac{3}{4}"),
        ("\\frac9{19}", "\\frac{9}{19}"),
        ("\\left( 3, \\tfrac{\\pi}{2} \\right)", "( 3, \\frac{\\pi}{2} )"),
        ("$11,\\! 111,\\! 100$.", "11,111,100"),
        ("1\\,000", "1000"),
        ("1 0", "1 0"),
        ("\\textbf{Monday}", "\\text{Monday}"),
        ("x≤2", "x\\le 2"),
        ("２√２", "2\\sqrt{2}"),
        ("15 cm²", "15 cm^{2}"),
        ("0.1\\overline{6}", "\\frac{15}{90}"),
        ("2.5 million", "2.5\\cdot 10^{6}"),
        ("1\\\\ 2", "1\\\\ 2"),  # the end of a row of a matrix is no space
    ],
)
def test_one_spelling(text, plain):
    assert clean(text) == plain


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1\\frac{4}{5}", Fraction(9, 5)), ("-1 4/5", Fraction(-9, 5)), ("1,000.5", Fraction(2001, 2)),
        ("6.02e23", 602 * 10**21), ("-2^2", -4), ("2^-3*4", Fraction(1, 2)), ("2^3^2", 512),
        ("\\frac{\\frac{1}{2}}{3}", Fraction(1, 6)), ("\\binom{5}{2}", 10), ("3!^2", 36), ("2(3)", 6),
        ("1^{10^{10}}", 1), ("(" * 450 + "4" + ")" * 450, 4), ("+".join("1" * 500), 500), ("1/2(3)", None),
        ("1 0", None), ("5/0", None), ("0^0", None), ("3!!", None), ("x", None), ("-", None), ("(1", None),
        ("\\frac{1}", None), ("10^{10^{10}}x", None), ("0.5^{-0.5}", None),
    ],
)  # fmt: skip
def test_plain_arithmetic(text, number):
    assert value(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "10^{10^{10}}", "-2^{1000000001}", "1e-999999999", "\\frac{10^{10^{10}}}{2}", "(10^6)!", "2^{10^{10}}+4",
        "\\binom{10^9}{10^8}",
    ],
)  # fmt: skip
def test_numbers_that_nobody_writes_down(text):
    assert value(text) == LARGE
    assert same(LARGE, Fraction(4)) is False and same(LARGE, LARGE) is None
    assert value("2^{4094}") == 2**4094 and value("530!") == math.factorial(530)


@pytest.mark.parametrize(
    "text",
    ["2^{4096}", "541!", "\\binom{9999}{4999}", "\\frac{2^{9^9}}{2^{9^9-2}}", "10^{10^{10}}-10^{10^{10}}", "0*9^{9^9}"],
)
def test_numbers_for_algebra(text):
    """They are too long for this process, or made of two that are."""
    assert value(text) is None


@pytest.mark.parametrize(
    "text", ["2^{2^{10^{10}}}", "((10^{100})!)!", "\\binom{1000000000}{500000000}", "9^9^9^9^9", "2^{10^{10}}+4"]
)
def test_towers_are_not_four(text):
    start = time.thread_time()
    assert equal(text, "4") is False and value(text) == LARGE
    assert time.thread_time() - start < 1


def test_answers_that_are_right():
    assert not others(pairs(RIGHT), "right")


def test_answers_that_are_wrong():
    assert not others(pairs(WRONG) + pairs(UNREAD), "wrong")


def test_the_rules_of_grading():
    """Every case of every rule, and the table that shows them."""
    found = grading_table.cases()
    for wanted in ("right", "wrong"):
        assert not others([(answer, gold) for _, gold, answers in found for answer in answers[wanted]], wanted)
    assert sum(len(answers["right"]) + len(answers["wrong"]) for rule, _, answers in found if "quations" in rule) > 60
    table = grading_table.table()
    assert all(f"**{rule.partition(':')[0]}.**" in table for rule, _, _ in found) and table.count("\n| `") == len(found)


def sorts() -> list[tuple[str, str, str]]:
    """Return (answer, gold, verdict) of pairs of all sorts: words, dates, sets, units, logic, as models write them."""
    found = grading_table.cases(grading_table.PAIRS)
    wanted = [
        (answer, gold, verdict) for _, gold, answers in found for verdict in answers for answer in answers[verdict]
    ]
    assert len(wanted) > 1300 and len({sort for sort, _, _ in found}) > 20
    return wanted


def missed(cases: list[tuple[str, str, str]]) -> list[tuple]:
    """Return the cases whose verdict is not the wanted one."""
    got = verdicts([(answer, gold) for answer, gold, _ in cases])
    return [(*case, outcome) for case, outcome in zip(cases, got, strict=True) if case[2] != outcome]


def test_pairs_of_all_sorts():
    """All that are decided in this process, and some of the others."""
    hard = [case for case in sorts() if equal(*case[:2]) is None]
    assert not missed([case for case in sorts() if case not in hard] + hard[::7])


@pytest.mark.slow
def test_all_pairs_of_all_sorts():
    assert not missed(sorts())


def test_numbers_are_compared_by_proof():
    """In this process, where a planted fault is seen."""
    from grpo.extras.grading.algebra import by_algebra

    equal_numbers = ["6^{10^9}", "2^{10^9}\\cdot 3^{10^9}"], ["\\sqrt{2}+\\sqrt{7}", "\\sqrt{9+2\\sqrt{14}}"]
    unlike = [
        ["(-3)^{10^9+1}", "3^{10^9+1}"], ["e^{-140}", "e^{-141}"], ["\\sqrt{2}+\\sqrt{7}", "\\sqrt{9+2\\sqrt{14}}+10^{-90}"],
        ["5^{10^9}+1", "5^{10^9}"], ["\\frac{\\pi}{10^{80}}", "\\frac{3}{10^{80}}"],
    ]  # fmt: skip
    assert {by_algebra(*pair) for pair in equal_numbers} == {"right"} and {by_algebra(*pair) for pair in unlike} == {
        "wrong"
    }
    assert by_algebra("10^{10^{10^{10}}}+\\pi", "10^{10^{10^{9}}}") == "timeout"  # unknown, and at once


def test_gold_answers_that_nobody_can_read_are_told_by_row(tmp_path, caplog):
    golds = [
        "7",
        "\\frac{1}{2}",
        "\\foo{",
        None,
        "",
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        "1,,2",
        "\\text{Monday}",
    ]
    assert unreadable(golds) == [2, 4, 6]
    rows = [json.dumps({"prompt": gold, "gold": gold}) for gold in ("7", "\\foo{", "\\sqrt{2}", "1,,2")]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    Jsonl(str(tmp_path / "train.jsonl"), ["correct"], gold="gold", splits={"train": "train"}).examples("train")
    assert "'train': 2 right answers cannot be read" in caplog.text and "Rows 2 ('\\\\foo{'), 4 ('1,,2')" in caplog.text
    with_roots = ["\\sqrt{2}+1", "(1,2]", "x^{2}-1", "3\\pi", "\\frac{\\sqrt{3}}{2}", "28\\%", "\\{1,2\\}"]
    assert all(map(sound, with_roots)) and not any(map(sound, ["3+", "\\frac{1}", "(1,2", "x^", "2+*3", "\\bar{"]))


def test_a_million_terms_are_wrong_or_too_much():
    """The outcome depends on the speed of the machine."""
    long = pairs("4 ~ \\prod_{k=1}^{10^6} k ~ \\sum_{k=1}^{1000000}\\frac{1}{k}")
    assert len(long) == 2 and {outcome for _, _, outcome in others(long, "wrong")} <= {"timeout"}


@pytest.mark.parametrize(
    ("answer", "gold", "outcome"),
    [
        (None, "3", "no_answer"),
        ("", "3", "wrong"),
        ("3" * 1001, "3", "wrong"),
        ("(" * 12 + "x" + ")" * 12, "x", "wrong"),  # over the cap; with 3 instead of x, arithmetic decides
        ("(" * 12 + "3" + ")" * 12, "3", "right"),
        ("५ apples", "18", "wrong"),  # sympy raises on it
        ("\x00\ud800", "18", "wrong"),
        ("3", "", "error"),
        ("3", "\\foo{", "error"),
        ("\\bar{", "\\foo{", "error"),
        ("(" * 12 + "x" + ")" * 12, "\\foo{", "error"),
    ],
)
def test_outcomes(answer, gold, outcome):
    assert verdict(answer, gold) == outcome


def test_an_answer_on_which_the_grader_runs_out_of_time_has_no_reward():
    (unknown,) = correct([f"\\boxed{{{ENDLESS}}}"], ["4"])
    assert math.isnan(unknown.value) and not unknown.correct and unknown.outcome == "timeout"


def test_a_gold_that_nobody_can_read_is_no_fault_of_the_answer():
    assert verdict("3", "\\foo{") == "error" and verdict("\\foo{", "3") == "wrong"
    (unknown,) = correct(["\\boxed{3}"], ["\\foo{"])
    assert math.isnan(unknown.value) and not unknown.correct and unknown.outcome == "error"


def test_an_answer_that_leaves_the_work_to_the_grader_is_wrong():
    """A calculation of the right number, and the formula of the question, which comes after a worked example."""
    asked = [("user", "$(x+1)^2$?"), ("assistant", "\\boxed{x^2+2x+1}"), ("user", "Multiply out $(x-1)^2$.")]
    prompt = [{"role": role, "content": content} for role, content in asked]
    answers = {"7*8": "56", "56": "56", "(x-1)^2": "x^2-2x+1", "1-2x+x^2": "x^2-2x+1"}
    found = correct([f"\\boxed{{{answer}}}" for answer in answers], [*answers.values()], prompts=[prompt] * 4)
    assert [reward.outcome for reward in found] == ["wrong", "right"] * 2


def test_one_poisoned_answer_costs_its_group_nothing():
    verdict("x+1", "1+x")  # a warm pool
    good = [(f"{k}(x+{k})", f"{k}x+{k * k}") for k in range(2, 65)]
    outcomes = verdicts([*good[:9], (ENDLESS, "17"), *good[9:]], threads=32)
    assert outcomes.pop(9) == "timeout" and outcomes == ["right"] * 63


def test_an_alarm_of_the_caller_still_rings():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        assert verdict("y+1+x", "1+x+y") == "right"
        while not rang:
            time.sleep(0.01)
        assert len(rang) == 1 and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@real_data
def test_our_61_cases():
    cases, missed = read(REAL_DATA / "grading_cases.jsonl"), []
    for case in cases:
        outcome = verdict(extract_answer(case["completion"]), case["gold"])
        if outcome in ("timeout", "error") or (outcome == "right") != case["correct"]:
            missed.append(case["id"])
    assert len(cases) == 61 and missed == []


@real_data
def test_gsm8k_solutions():
    solutions = [
        row["answer"] for name in ("gsm8k_train_1000", "gsm8k_test") for row in read(REAL_DATA / f"{name}.jsonl")
    ]
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert [reward.outcome for reward in correct(solutions, golds)] == ["right"] * 2319
    numbers = [Fraction(gold.replace(",", "")) for gold in golds]
    for shift in (1, 7, 100):
        shifted = [(i + shift) % 2319 for i in range(2319)]
        rewards = correct(solutions, [golds[j] for j in shifted])
        assert [reward.correct for reward in rewards] == [numbers[i] == numbers[j] for i, j in enumerate(shifted)]


def math500() -> tuple[list[str], list[str]]:
    found = read(REAL_DATA / "math500_test.jsonl")
    return [row["solution"] for row in found], [row["answer"] for row in found]


@real_data
def test_math500_solutions():
    solutions, golds = math500()
    assert [reward.outcome for reward in correct(solutions, golds)] == ["right"] * 500


@real_data
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_math500_answers_of_other_questions_are_wrong(shift):
    _, golds = math500()
    bare = [re.sub(r"\^\\circ|^x=|\\mbox.*| ", "", gold) for gold in golds]
    questions = [(golds[i - shift], golds[i]) for i in range(500) if bare[i - shift] != bare[i]]
    assert len(questions) > 480 and not others(questions, "wrong")


def spoiled(gold: str) -> set[str]:
    """Return wrong answers that look like `gold`: a number one too large, another sign, no root, a rounded pi."""
    spoils = {
        gold[: n.start()] + str(int(n[0]) + 1) + gold[n.end() :] for n in re.finditer("[0-9]+", gold.split("\\mbox")[0])
    }
    spoils |= {gold[1:] if gold[0] == "-" else f"-{gold}", gold.replace("\\sqrt", ""), gold.replace("+", "-", 1)}
    spoils |= {gold.replace(" - ", " + ", 1), gold.replace("\\pi", "3.14159265358979"), f"2({gold})"}
    return spoils - {gold}


def respelled(gold: str) -> set[str]:
    """Return other spellings of `gold`."""
    spellings = {
        gold.replace("\\frac", "\\dfrac"),
        gold.replace("\\frac", "\\tfrac"),
        gold.replace(" ", ""),
        f"${gold}$",
    }
    spellings |= {
        f"{gold}.",
        f"\\,{gold}\\,",
        f"\\displaystyle {gold}",
        gold.replace("(", "\\left(").replace(")", "\\right)"),
    }
    spellings |= {gold.replace("\\pi", "π").replace("\\sqrt", "√").replace("^\\circ", "°").replace("-", "−")}
    if not re.search(r"[0-9] ?\\frac", gold):  # a mixed number
        spellings.add(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold))
        spellings.add(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\\frac{2\\cdot \1}{2\\cdot \2}", gold))
    if re.fullmatch(r"[-+0-9a-zA-Z^ ]+|\\frac\{\d+\}\{\d+\}|[0-9]*\\sqrt\{\d+\}", gold):  # not a set or a text
        spellings |= {f"\\frac{{2({gold})}}{{2}}", f"0 + {gold}", f"({gold})", f"{gold}\\text{{ units}}"}
    return {spelling.replace("\\left\\left", "\\left").replace("\\right\\right", "\\right") for spelling in spellings}


@real_data
@pytest.mark.slow
def test_math500_answers_spoiled_and_respelled():
    golds = sorted(set(math500()[1]) - {"0"})  # -0 is right
    wrong = [(answer, gold) for gold in golds for answer in sorted(spoiled(gold))]
    right = [(answer, gold) for gold in golds for answer in sorted(respelled(gold))]
    assert len(wrong) > 700 and not others(wrong, "wrong")
    assert len(right) > 2000 and not others(right, "right")
