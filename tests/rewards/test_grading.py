"""Grading: extraction of answers, exact arithmetic, algebra, real answers.

The tables are `gold ~ answer ~ answer ...`, a line for each kind; they were written by hand.
"""
# ruff: noqa: RUF001 - a policy writes any character

import json
import math
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from conftest import REAL_DATA

from grpo.rewards.functions import correct
from grpo.rewards.math.answers import clean, equal, extract_answer
from grpo.rewards.math.arithmetic import LARGE, same, value
from grpo.rewards.math.grading import verdict

ENDLESS = "\\ln(10^{10^{10}})"  # sympy computes the whole power
real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real answers on this machine")

RIGHT = r"""
15 ~ \sum_{k=1}^{5} k ~ \sum_{k=1}^5 k ~ \int_0^5 \frac{6x}{5} dx ~ S_5=15 ~ S_{5} = 15
6 ~ \prod_{k=1}^{3} k ~ \lim_{n\to\infty} \frac{6n}{n+1} ~ \gcd(12, 18) ~ |-6| ~ \lfloor 6.5 \rfloor
True ~ true ~ \text{true} ~ \textbf{True}
18 ~ 18. ~ 18 eggs ~ \text{18}
4 ~ \text{4} ~ \mathbf{4} ~ {4} ~ (4) ~ 4. ~ x=4 ~ \$4 ~ 2+2 ~ **4** ~ \(4\) ~ $4$ ~ $$4$$ ~ 4\text{ cm}
4 ~ 4\,\text{cm} ~ 4 cm^2 ~ 4~\mathrm{cm} ~ 4 \text{ m}/\text{s} ~ 4 m/s ~ 4 miles per hour ~ 4 hours
4 ~ 4\ \text{hours}. ~ +4 ~ ４ ~ 4.0 ~ 4. ~ \frac{8}{2} ~ \sqrt{16} ~ 2^2 ~ 2**2 ~ 4!/3! ~ \binom{4}{1} ~ \{4\}
-3 ~ -3 ~ —3 ~ - 3 ~ −3 ~ -\frac{6}{2}
0.5 ~ \frac12 ~ .5 ~ 1/2 ~ ½
1\frac{1}{2} ~ 1.5 ~ 3/2 ~ 1 1/2 ~ 1½
1000 ~ 1 000 ~ 1{,}000 ~ 1,000 ~ 10^3 ~ 1e3 ~ 1E3 ~ 1.0 \times 10^3 ~ 10³ ~ 1 thousand
28\% ~ 28 ~ 28\% ~ 28% ~ 0.28 ~ 28 percent ~ \frac{28}{100} ~ \frac{7}{25}
28 ~ 28\% ~ 28\text{ percent}
0.28 ~ 28\%
5_8 ~ 5_{8}
52_8 ~ 52_{8}
4210_{5} ~ 4210_5
90^\circ ~ 90 ~ 90^{\circ} ~ 90 \text{ degrees} ~ 90 degrees ~ 90\degree
\sqrt{2} ~ √2 ~ √(2) ~ \sqrt2 ~ 2^{1/2} ~ sqrt(2) ~ 2^{0.5} ~ \frac{2}{\sqrt2}
\sqrt{12} ~ 2√3
18 ~ Answer: 18 ~ The answer is $18. ~ \text{Answer: }18 ~ \text{The answer is 18} ~ **18**. ~ 18** ~ ** 18 ~ **18** eggs
18 ~ *18* ~ __18__ ~ USD 18 ~ 18¢ ~ \pounds 18 ~ 18\ ~ 18\\ ~ \large 18 ~ {\bf 18} ~ \boldsymbol{18}
18 ~ \color{red}{18} ~ \underline{18} ~ \textcolor{red}{18} ~ \text{18 eggs} ~ 18 sq ft ~ 18 a.m.
18 ~ 18\text{ kg}\cdot\text{m} ~ 18\text{ m s}^{-1} ~ ‎18‏
1/3 ~ 0.\bar{3} ~ 0.\dot{3}
1000 ~ 1\;000 ~ 1\ 000 ~ 1~000
1 ~ 1^{10^{10}} ~ (10^{10})^0
\binom{1000}{500} ~ \binom{1000}{499}\cdot\frac{501}{500}
\frac12 ~ \sin 30^\circ ~ \cos(60^\circ) ~ \sin{30^{\circ}}
\tan x ~ tan x ~ tan(x) ~ \operatorname{tan} x ~ \mathrm{tan}(x)
2\pi\ln 2 ~ 2 pi ln 2 ~ pi ln(4)
(-\infty,2] ~ \{x\mid x\le 2\} ~ \{x : x \le 2\}
\{1,2\} ~ \lbrace 1,2\rbrace
\emptyset ~ \{\} ~ \{ \}
\mathbb{R} ~ \R ~ \mathbb R
\mathbb{R}\setminus\{0\} ~ \mathbb{R}\backslash\{0\}
\text{ellipse} ~ an ellipse ~ \text{an ellipse} ~ {ellipse} ~ \emph{ellipse} ~ \textsc{Ellipse}
3r^2 ~ 3 r^{2}
15\text{ cm}^2 ~ 15\text{ m} ~ 15\text{ cm}^{2}
\{1,2\} ~ \{2,1\} ~ 1,2 ~ {1,2} ~ 1 \text{ and } 2 ~ 1 and 2 ~ \left\{1,2\right\} ~ \{1,1,2\}
\{1,2\} ~ x=1 \text{ or } x=2
1,2 ~ x=1,2 ~ x=1, x=2 ~ x=1 \text{ or } x=2 ~ x = 1 or 2
(1,2) ~ \left(1,2\right) ~ (1, 2) ~ (1.0,\frac{4}{2}) ~ (x,y)=(1,2) ~ \langle 1,2\rangle ~ x=1,y=2
(1,2),(3,4) ~ (3,4),(1,2)
\{(1,2),(3,4)\} ~ (1,2),(3,4)
(-\infty,2] ~ x \leq 2 ~ (-∞,2] ~ x≤2
(2,3) ~ 2<x<3 ~ x\in(2,3)
[2,3] ~ 2≤x≤3
(-\infty,2)\cup(3,\infty) ~ (3,\infty)\cup(-\infty,2)
\mathbb{R} ~ (-\infty,\infty)
\emptyset ~ \varnothing
\text{Monday} ~ Monday ~ monday. ~ \mathrm{Monday} ~ \text{ Monday }
\text{(A)} ~ A ~ (A) ~ \textbf{(A)} ~ \mathrm{(A)} ~ \text{A}
A ~ \text{A} ~ (A)
C ~ \text{(C)}
\text{June 20} ~ June 20
\text{Yes} ~ yes
Yes ~ \text{yes}
even ~ \text{even}
2k+2 ~ 2(k+1)
\ln 2 ~ \log_e 2
\frac{x+1}{2} ~ \frac12 x+\frac12
x^{-1} ~ \frac1x
|x| ~ \sqrt{x^2}
\sin 2x ~ 2\sin x\cos x
\sin(2x) ~ 2\sin(x)\cos(x)
y=2x+3 ~ 2x-y+3=0 ~ y=3+2x ~ 2x+3
f(x)=x^2 ~ x^2
x^2 ~ f(x)=x^2
\frac{n(n-1)}{2} ~ \binom{n}{2}
x_1 ~ x_{1}
\arcsin x ~ \sin^{-1} x
a^2 ~ a**2
2x ~ 2*x ~ 2 \cdot x
\pi r^2 ~ πr²
e^{2x} ~ (e^x)^2
\frac{1}{2}\ln 3 ~ \ln\sqrt3
3+4i ~ 4i+3
i ~ \sqrt{-1}
1-i ~ \frac{2}{1+i}
\frac{\pi}{2} ~ 0.5\pi ~ π/2
288\pi ~ 288π
x \in [-2,7] ~ [-2,7] ~ -2 \le x \le 7
\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} ~ \begin{bmatrix} -2 \\ -14 \\ -7 \end{bmatrix}
\begin{pmatrix} -2 \\ -14 \\ -7 \end{pmatrix} ~ \left(\begin{array}{c}-2\\-14\\-7\end{array}\right)
\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} ~ \begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}
3 \pm 2\sqrt2 ~ 3+2\sqrt2, 3-2\sqrt2
5.4 \text{ cents} ~ 5.4
\$32,\!348 ~ 32348
\$18.90 ~ 18.9
15\mbox{ cm}^2 ~ 15 ~ 15 cm² ~ 15 square centimeters
10,\!080 ~ 10080
.0000672 ~ 6.72\times10^{-5}
1 ~ 0.\overline{9}
6 ~ 3! ~ \frac{12}{2}=6 ~ 2+4=6 ~ = 6 ~ x = 2\cdot 3 = 6
2^{100} ~ 2^{99}\cdot 2
10^{10^{10}} ~ 10^{10^{10}}
2.5 million ~ 2500000
2\pi ~ \tfrac{4\pi}{2}
\frac{3}{4} ~ \frac{3}{4}\text{ of the cake}
3:2 ~ 3 : 2
5 ~ 5 \text{ (five)} ~ 5 \quad
5 ~ 5 <|im_end|> ~ 5</s>
0 ~ -0
x ~ x.
x+1 ~ (x+1)
x^{10} ~ x^10
"""

WRONG = r"""
18 ~ 17 ~ -18 ~ 18 or 19 ~ 18, 19 ~ 18x ~ 18 x ~ 18i ~ 18\pi ~ 18 pi ~ 1 8 ~ 18 million ~ 18.0001
10 ~ 1 0 ~ 1\,0
1 ~ 1.000001 ~ 1,2 ~ \{1,2\} ~ \frac{10^{100}+1}{10^{100}} ~ 0.9999999999999999999999
1/3 ~ 0.333333
\frac{1}{3} ~ 0.333333333333 ~ 0.33333333333333333333333333
0.333333 ~ \frac13
2^{-98} ~ 2^{-99}
2e-7 ~ 1e-7
2\times 10^{-7} ~ 10^{-7}
5_8 ~ 5
5 ~ 5_8 ~ 5 dozen ~ 5 hundred
4 ~ 4a ~ 4 a ~ 4ab ~ 4abc ~ 4m ~ 4x^2 ~ 4 \sin x ~ 4 cos x ~ 4 arctan x ~ 4^\circ+1
4s ~ 4
4abc ~ 4
x=1,y=2 ~ x=2,y=1 ~ x=1,y=3 ~ y=1,x=2
\{4\} ~ 5 ~ \{5\} ~ \{2^{1000000000}\}
52_8 ~ 52 ~ 52_7
28\% ~ 0.28\% ~ 2800 ~ 29
28 ~ 0.28
\pi ~ 3.14159 ~ 3.141592653589793 ~ 22/7
\sqrt2 ~ 1.41421356
e ~ 2.718281828
(1,2) ~ (2,1) ~ [1,2] ~ (1,2] ~ (1,2,3) ~ \{1,2\}
\{1,2\} ~ \{1,2,3\}
1,2 ~ 1 ~ 1,3
x=1 ~ y=1 ~ x=2
y=2x+3 ~ y=2x-3
\text{even} ~ odd ~ \text{not even}
\text{(A)} ~ B ~ 1
A ~ B ~ a+b
p-q ~ q-p
x ~ -x ~ y
x^2 ~ x^3 ~ 2x
\sin x ~ \cos x ~ x
\frac{1}{x} ~ x
3 ~ \infty ~ \emptyset ~ \text{no} ~ None ~ nan ~ ? ~ \frac{3}{0} ~ \frac{}{} ~ \sqrt{} ~ \begin{matrix} ~ }{
3 ~ { ~ \ ~ \\ ~ $ ~ % ~ ^ ~ 3^ ~ __import__('os').system('true') ~ \input{/etc/passwd} ~ 😀 ~ 3😀4 ~ \left(
3 ~ \text{3 ~ 3,000 ~ 3 and 4 ~ 3 \text{ or } 4
3.5 ~ 3,5
1000 ~ 1.000
4 ~ 9^9^9^9^9 ~ 9**9**9**9 ~ x^{x^{x^x}} ~ \binom{10^9}{5\cdot 10^8} ~ (10^{10})! ~ ((3!)!)! ~ 10^{10^{10}}+4
4 ~ \frac{10^{10^{10}}}{10^{10^{9}}} ~ 4\cdot(1+10^{-100}) ~ -10^{10^{10}}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ~ \begin{pmatrix} 1 & 2 \end{pmatrix}
[-1,1) ~ [-1,1]
15\text{ cm}^2 ~ 15\text{ cm}^3 ~ 15 cm^3
3r^2 ~ 3R^2
512 ~ 2**3**1
\sin 30 ~ \sin 30^\circ
(-\infty,2) ~ [-\infty,2)
(0,\infty) ~ (0,\infty]
(-\infty,2] ~ x<2 ~ x\ge2
(2,3)\cup(4,5) ~ (2,3)\cap(4,5) ~ (2,3)
6-5i ~ 6+5i
1-\frac1e ~ 1+\frac{1}{\mathrm{e}} ~ 0.632
90^\circ ~ 91^\circ
x^2+1 ~ (x+1)^2
\ln 2 ~ \log 3
2\sqrt3 ~ 3\sqrt2
\frac{\sqrt3}{3} ~ \frac{\sqrt3}{2}
\frac{3}{4} ~ \frac{4}{3}
3/4 ~ 34
1\frac{4}{5} ~ \frac{4}{5} ~ 14/5
11,\!111 ~ 11.111
"""

# Right to a reader, but not parsed: text before a number, numbers as words, words beside words.
UNREAD = r"""
5 ~ \text{five} ~ 5 (five) ~ \approx 5 ~ about 5
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Return (answer, gold) for every answer in a table."""
    lines = [line.split(" ~ ") for line in table.strip().splitlines()]
    return [(answer, gold) for gold, *answers in lines for answer in answers]


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (REAL_DATA / name).read_text().splitlines()]


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
        ("1\\frac{4}{5}", Fraction(9, 5)),
        ("-1 4/5", Fraction(-9, 5)),
        ("1,000.5", Fraction(2001, 2)),
        ("6.02e23", 602 * 10**21),
        ("-2^2", -4),
        ("2^-3*4", Fraction(1, 2)),
        ("2^3^2", 512),
        ("\\frac{\\frac{1}{2}}{3}", Fraction(1, 6)),
        ("\\binom{5}{2}", 10),
        ("3!^2", 36),
        ("2(3)", 6),
        ("1^{10^{10}}", 1),
        ("(" * 450 + "4" + ")" * 450, 4),
        ("+".join("1" * 500), 500),
        ("1/2(3)", None),
        ("1 0", None),
        ("5/0", None),
        ("0^0", None),
        ("3!!", None),
        ("x", None),
        ("-", None),
        ("(1", None),
        ("\\frac{1}", None),
        ("10^{10^{10}}x", None),
        ("0.5^{-0.5}", None),
    ],
)
def test_plain_arithmetic(text, number):
    assert value(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "2^{4096}",
        "10^{10^{10}}",
        "-2^{1000000001}",
        "1e-999999999",
        "\\frac{10^{10^{10}}}{2}",
        "541!",
        "\\binom{9999}{4999}",
    ],
)
def test_numbers_that_nobody_writes_down(text):
    assert value(text) == LARGE
    assert same(LARGE, Fraction(4)) is False and same(LARGE, LARGE) is None
    assert value("2^{4094}") == 2**4094 and value("540!") == LARGE != value("530!")


@pytest.mark.parametrize(
    "text", ["2^{2^{2^{2^{2^{2}}}}}", "((10^{100})!)!", "\\binom{1000000000}{500000000}", "9^9^9^9^9", "2^{10^{10}}+4"]
)
def test_towers_are_not_four(text):
    start = time.thread_time()
    assert equal(text, "4") is False and value(text) == LARGE
    assert time.thread_time() - start < 1


def test_answers_that_are_right():
    assert not others(pairs(RIGHT), "right")


def test_answers_that_are_wrong():
    assert not others(pairs(WRONG) + pairs(UNREAD), "wrong")


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
        (ENDLESS, "4", "timeout"),
    ],
)
def test_outcomes(answer, gold, outcome):
    assert verdict(answer, gold) == outcome


def test_a_gold_that_nobody_can_read_is_no_fault_of_the_answer():
    assert verdict("3", "\\foo{") == "error" and verdict("\\foo{", "3") == "wrong"
    (unknown,) = correct(["\\boxed{3}"], ["\\foo{"])
    assert math.isnan(unknown.value) and not unknown.correct and unknown.outcome == "error"


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
    cases = rows("grading_cases.jsonl")
    missed = []
    for case in cases:
        outcome = verdict(extract_answer(case["completion"]), case["gold"])
        if outcome in ("timeout", "error") or (outcome == "right") != case["correct"]:
            missed.append(case["id"])
    assert len(cases) == 61 and missed == []


@real_data
def test_gsm8k_solutions():
    solutions = [row["answer"] for name in ("gsm8k_train_1000", "gsm8k_test") for row in rows(f"{name}.jsonl")]
    golds = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert [reward.outcome for reward in correct(solutions, golds)] == ["right"] * 2319
    numbers = [Fraction(gold.replace(",", "")) for gold in golds]
    for shift in (1, 7, 100):
        shifted = [(i + shift) % 2319 for i in range(2319)]
        rewards = correct(solutions, [golds[j] for j in shifted])
        assert [reward.correct for reward in rewards] == [numbers[i] == numbers[j] for i, j in enumerate(shifted)]


def math500() -> tuple[list[str], list[str]]:
    found = rows("math500_test.jsonl")
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
