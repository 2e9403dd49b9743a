"""The tasks: rows, prompts and rewards of each; one from outside the repository."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest
from conftest import EXAMPLES, REAL_DATA, ROOT, compose_config
from helpers.episodes import said
from helpers.rows import write
from hydra.utils import instantiate

from grpo.data.rows import side
from grpo.env.messages import Message
from grpo.env.scoring import score_group
from grpo.env.types import Example
from grpo.runs.run import Run
from grpo.system.errors import UserError
from tasks import calculator, countdown, gsm8k, wordmath
from tasks.calculator import Calculator
from tasks.code import Code, chat
from tasks.countdown import Countdown
from tasks.gsm8k import GSM8K
from tasks.jsonl import Jsonl
from tasks.math import Math
from tasks.mixture import Mixture, interleaved, shares
from tasks.musique import question_of
from tasks.wordmath import Wordmath
from train import train

real = pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real rows on this machine")


def asked(task, example: Example) -> tuple[Message, ...]:
    return task.build(example).start().messages


# -- gsm8k


def test_gsm8k_rewards():
    task = GSM8K(str(EXAMPLES))
    example = task.examples("train")[2]
    assert example["answer"].endswith("#### 1,000")
    for text, value, outcome, form in [
        ("It is \\boxed{1000}.", 1.1, "right", 1.0),
        ("#### 1,000", 1.1, "right", 1.0),
        ("It is \\boxed{999}.", 0.1, "wrong", 1.0),
        ("It is 1000.", 0.0, "no_answer", 0.0),
        ("\\boxed{1000}\nQuestion: more? Answer: \\boxed{5}", 1.1, "right", 1.0),
    ]:
        reward = task.score(example, said(text))
        assert (reward.value, reward.outcome, reward.parts["format"]) == (pytest.approx(value), outcome, form), text
        assert reward.correct == (outcome == "right")
    chat = GSM8K(str(EXAMPLES), "chat")  # in chat, a repeated question does not end the answer
    assert chat.score(example, said("Sure.\nQuestion: how many?\n\\boxed{1000}")).correct


def test_gsm8k_prompts():
    worked = {"question": "How many?", "answer": "2 and 3 are 2+3=<<2+3=5>>5, and 5-4=<<5-4=1>>1.\n#### 1"}
    said = "2 and 3 are 2+3=5, and 5-4=1.\nThe answer is \\boxed{1}."  # without the marks of its calculator
    assert [GSM8K(str(EXAMPLES), prompt).demonstration(worked) for prompt in ("chat", "one_shot")] == [said, f" {said}"]
    example = {"question": "How many?", "answer": "#### 1"}
    (chat,) = asked(GSM8K(str(EXAMPLES), "chat"), example)
    assert chat.role == "user" and chat.content.startswith("How many?") and "\\boxed{}" in chat.content
    shot, solution, question = asked(GSM8K(str(EXAMPLES), "chat_one_shot"), example)
    assert [shot.role, solution.role, question] == ["user", "assistant", chat] and "\\boxed{16}" in solution.content
    for prompt, questions in (("zero_shot", 1), ("one_shot", 2)):
        (text,) = asked(GSM8K(str(EXAMPLES), prompt), example)
        assert text.content.endswith("Question: How many?\nAnswer:") and text.content.count("Question:") == questions
    with pytest.raises(
        UserError, match=r"task\.prompt=two_shot is not one of chat, chat_one_shot, one_shot, zero_shot"
    ):
        GSM8K(prompt="two_shot")


@real
def test_gsm8k_grades_its_own_solutions():
    from grpo.extras.grading.answers import extract_answer

    task = GSM8K(str(REAL_DATA))
    train, test = task.examples("train"), task.examples("test")
    assert (len(train), len(test)) == (1000, 1319)  # no row is empty, repeated or in both splits
    rows = [*train, *test]
    assert all(task.score(row, said(row["answer"])).correct for row in rows)
    golds = [Fraction(extract_answer(row["answer"]).replace(",", "")) for row in rows]
    for (row, other), (gold, wrong) in zip(pairwise(rows), pairwise(golds), strict=True):
        assert task.score(row, said(other["answer"])).correct == (gold == wrong)


# -- math

ROW = {"problem": "What is half of one?", "solution": "It is $\\boxed{\\frac12}$.", "level": "Level 3"}


def test_math_rows_levels_and_rewards(tmp_path):
    path = write(tmp_path / "test.jsonl", [ROW, {**ROW, "problem": "And twice?", "answer": "2", "level": 5}])
    task = Math(path, "chat")
    first, second = task.examples("test")
    right = task.score(first, said("\\boxed{0.5}"))
    assert (right.value, right.outcome) == (1.1, "right")
    assert right.parts == {"format": 1.0, "level_3": 1.0}
    assert task.score(second, said("\\boxed{1}")).parts == {"format": 1.0, "level_5": 0.0}
    assert task.score({**ROW, "solution": "no box"}, said("\\boxed{1}")).outcome == "error"  # and not wrong
    assert [row["problem"] for row in Math(path, levels=[5]).examples("test")] == ["And twice?"]
    unknown = task.score({"problem": "?", "solution": "no box", "level": 3}, said("\\boxed{1}"))
    assert unknown.outcome == "error" and "level_3" not in unknown.parts  # unknown, so not 0
    with pytest.raises(UserError, match=r"task\.levels=\[1\] leaves none of the 2 rows"):
        Math(path, levels=[1]).examples("test")


# -- countdown


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("<answer>25 + 3 * 7</answer>", "right"),
        ("<answer>(25 + 3 * 7) = 46</answer>", "right"),
        ("no: <answer>1</answer> but <answer>7*3+25</answer>", "right"),
        ("\\boxed{25 + 7 * 3}", "right"),
        ("<answer>25 + 21</answer>", "wrong"),  # equal, but not with these numbers
        ("<answer>25 + 3 * 7 + 3 - 3</answer>", "wrong"),  # 3 is used too often
        ("<answer>3 + 7 + 25</answer>", "wrong"),
        ("<answer>3 / (7 - 7) + 25</answer>", "wrong"),
        ("<answer>25 + 3 ** 7</answer>", "wrong, no expression"),
        ("<answer>__import__('os').abort()</answer>", "wrong, no expression"),
        ("<answer>" + "(" * 150 + "</answer>", "wrong, no expression"),
        ("<answer>" + "9" * 5000 + "</answer>", "wrong, no expression"),
        ("46", "no_answer"),
        ("<think><answer>25 + 3 * 7</answer></think> I give up", "no_answer"),
    ],
)
def test_countdown_grading(text, outcome):
    reward = Countdown().score({"numbers": [3, 7, 25], "target": 46}, said(text))
    assert reward.outcome == outcome.partition(",")[0] and reward.correct == (outcome == "right")
    assert reward.value == {"right": 1.1, "wrong": 0.1, "wrong, no expression": 0.0, "no_answer": 0.0}[outcome]


def test_countdown_puzzles_can_be_solved_and_do_not_leak():
    task = Countdown(numbers=[3])
    for split in ("train", "validation", "test"):
        for row in task.examples(split)[:30]:
            a, b, c = row["numbers"]
            texts = [
                text
                for x, y, z in ((a, b, c), (b, c, a), (c, a, b), (b, a, c), (c, b, a), (a, c, b))
                for p in "+-*/"
                for q in "+-*/"
                for text in (f"({x}{p}{y}){q}{z}", f"{z}{q}({x}{p}{y})")
            ]
            rewards = task.score_group(row, [said(f"<answer>{text}</answer>") for text in texts])
            assert any(reward.correct for reward in rewards), row
            assert side([sorted(row["numbers"]), row["target"]], countdown.HELD_OUT) == split
    (message,) = asked(task, {"numbers": [3, 7, 25], "target": 46})
    assert "3, 7, 25" in message.content and "equals 46" in message.content and "<answer>" in message.content
    assert task.examples("train")[5] == Countdown(numbers=[3]).examples("train")[5]
    assert countdown.draw(random.Random(0), 4, 99).keys() == {"numbers", "target"}
    with pytest.raises(UserError, match=r"task\.numbers=\[9\]"):
        Countdown(numbers=[9])


# -- any rows


def test_jsonl_takes_texts_and_conversations(tmp_path):
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
    path = write(
        tmp_path / "rows.jsonl", [{"ask": conversation, "right": "4"}, {"ask": conversation[1:], "right": "5"}]
    )
    task = Jsonl(path, "correct", prompt="ask", gold="right")
    row = task.examples("test")[0]
    assert [m.role for m in asked(task, row)] == ["system", "user"]
    seen = []
    spy = Jsonl(path, lambda prompts, completions: seen.append((prompts, completions)) or [0], prompt="ask")
    spy.score(row, said("4", *asked(spy, row)))
    assert seen == [([conversation], [[{"role": "assistant", "content": "4"}]])]  # any column may have a conversation
    assert task.score(row, said("\\boxed{4}")).outcome == "right"
    numbers = write(tmp_path / "numbers.jsonl", [{"prompt": f"{i} + 1?", "right": i + 1} for i in range(40)])
    task = Jsonl(numbers, "correct", gold="right", held_out={"test": 0.2})
    assert task.score({"prompt": "2 + 1?", "right": 3}, said("#### 3")).outcome == "right"
    path = write(tmp_path / "texts.jsonl", [{"prompt": f"{i} + {i}?"} for i in range(40)])
    task = Jsonl(path, "unique_letters", template="Say: {prompt}", system="Be brief.", held_out={"test": 0.2})
    assert asked(task, {"prompt": "1?"}) == (Message("system", "Be brief."), Message("user", "Say: 1?"))
    assert len(task.examples("train")) + len(task.examples("test")) == 40
    for wrong, message in [
        ({"rewards": "correct"}, "'correct' needs 'gold', which is no column of test"),
        ({"prompt": "question"}, "no column 'question'; it has prompt"),
        ({"template": "Say:"}, r"must say \{prompt\}"),
    ]:
        with pytest.raises(UserError, match=message):
            Jsonl(path, **({"rewards": "longer"} | wrong)).examples("test")
    with pytest.raises(UserError, match="neither a text nor a list of messages"):
        asked(task, {"prompt": [{"from": "user"}]})


def test_tldr_wants_a_length(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "A long story."}])
    task = instantiate(compose_config("task=tldr", f"task.path={tmp_path}", "output_dir=.").task)
    rewards = task.score_group(task.examples("train")[0], [said("x" * n) for n in (200, 190, 100, 0)])
    assert [r.value for r in rewards] == pytest.approx([0, -0.1, -1, -2])
    assert [r.correct for r in rewards] == [True, True, False, False]


def test_the_experiment_of_trl_wants_20_characters(smoke, tmp_path):
    """The toy model's answers of 8 tokens are shorter or longer than that, whatever it says."""
    rows = tmp_path / "rows"
    rows.mkdir()
    for name in ("train", "test"):
        write(rows / f"{name}.jsonl", [{"prompt": f"A long {name} story, part {i}."} for i in range(4)])
    given = [one for one in smoke() if not one.startswith("task")]
    config = compose_config("experiment=tldr_length", *given, f"task.path={rows}", "callbacks=[samples]", "logger=csv")
    rewards = instantiate(config.task).score_group({"prompt": ""}, [said("x" * n) for n in (20, 25, 14, 0)])
    assert [(r.value, r.correct) for r in rewards] == [(0, True), (-5, True), (-6, False), (-20, False)]
    train(config)
    run = Run(tmp_path)
    answers = run.samples(columns=["rollout", "completion", "reward"])
    assert list(answers["reward"]) == [-abs(20 - len(text)) for text in answers["completion"]]
    assert run.metrics["rollout/reward"].iloc[-1] == pytest.approx(answers["reward"][answers["rollout"] == 2].mean())


# -- code

ADD = {"prompt": "Add two numbers.", "test_imports": [], "test_list": ["assert add(2, 3) == 5"]}
DOUBLE = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(f):\n    assert f(4) == 8\n",
}


def test_code_prompts_and_rewards(tmp_path):
    path = write(tmp_path / "train.jsonl", [ADD])
    chat, base = Code(path, "chat"), Code(path, "base")
    assert (
        "assert add(2, 3) == 5" in asked(chat, ADD)[0].content
        and "```python\ndef double" in asked(chat, DOUBLE)[0].content
    )
    assert asked(base, ADD)[0].content.endswith("```python\n") and asked(base, DOUBLE)[0].content == DOUBLE["prompt"]
    good = "def add(a, b):\n    return a + b\n"
    rewards = chat.score_group(
        ADD, [said(t) for t in (f"```python\n{good}```", "```python\ndef add(a, b): pass\n```", good)]
    )
    assert [(r.value, r.outcome) for r in rewards] == [(1, "right"), (0, "wrong"), (1, "right")]
    assert [
        chat.score(row, said(text)).outcome
        for row, text in ((ADD, "a + b"), (DOUBLE, "    return 2 * x"), (DOUBLE, "2 * x"), (ADD, f"```python\n{good}"))
    ] == ["no_answer", "right", "no_answer", "no_answer"]
    unreadable = chat.score({**ADD, "test_list": ["assert add(2, 3) =="]}, said(f"```python\n{good}```"))
    assert unreadable.outcome == "error" and not unreadable.known  # the row's fault, not the program's
    assert base.score(ADD, said(f"{good}```")).correct and base.score(DOUBLE, said("    return 2 * x\nprint()")).correct
    loop = instantiate(
        compose_config("task=code", f"task.path={path}", "task.rewards.0.seconds=0.5", "output_dir=.").task
    )
    endless = loop.score(ADD, said("```python\nwhile True: pass\n```"))
    assert endless.outcome == "wrong" and endless.parts["program_timeout"] == 1.0
    path = write(tmp_path / "bad.jsonl", [{"prompt": "p", "tests": "t"}])
    with pytest.raises(UserError, match="the rows of the code task have prompt, tests: they need"):
        Code(path).examples("test")


@real
def test_code_rows_and_their_own_solutions():
    task = Code(str(REAL_DATA / "humaneval_20.jsonl"), "base")
    rows = task.examples("test")
    assert [task.score(row, said(row["canonical_solution"])).outcome for row in rows] == ["right"] * 20
    task = Code(str(REAL_DATA / "mbpp_sanitized_30.jsonl"), "chat")
    assert [task.score(row, said(row["code"])).outcome for row in task.examples("test")] == ["right"] * 30


# -- several


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gsm8k.PROMPTS["one_shot"]([1]), r"the question \[1\] is no text"),
        (lambda: chat({"prompt": "Add.", "test_list": "assert"}), "test_list=assert must be a list of texts"),
        (lambda: chat({"prompt": "Add.", "test_list": None}), "test_list=null must be a list of texts"),
        (lambda: question_of({"question": "Who?", "paragraphs": ["a"]}), "the paragraph 'a' must be a mapping"),
    ],
)
def test_columns_of_another_kind_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_shares_of_a_mixture():
    # a: 100 rows, weight 3; b: 10 rows, weight 1. One pass over a takes 33 rows of b, which starts again
    assert shares({"a": 100, "b": 10}, {"a": 3, "b": 1}) == {"a": 100, "b": 33}
    assert shares({"a": 10, "b": 100}, {"a": 1, "b": 1}) == {"a": 100, "b": 100}
    order = interleaved({"a": 4, "b": 2})
    assert [source for source, _ in order] == ["a", "b", "a", "a", "b", "a"]
    assert [i for source, i in order if source == "a"] == [0, 1, 2, 3]


def test_a_mixture_asks_and_scores_as_its_sources_do():
    gsm8k, puzzles = GSM8K(str(EXAMPLES)), Countdown(sizes={"train": 12, "test": 3, "validation": 1})
    task = Mixture({"gsm8k": {"task": gsm8k}, "countdown": {"task": puzzles}}, {"gsm8k": 1, "countdown": 3})
    train, test = task.examples("train"), task.examples("test")
    assert [sum(row["source"] == name for row in train) for name in ("gsm8k", "countdown")] == [4, 12]
    assert [row["source"] for row in test] == ["gsm8k", "countdown"] * 3  # alternating, so a limit keeps some of each
    row = next(row for row in train if row["source"] == "gsm8k")
    assert asked(task, row) == asked(gsm8k, row["example"])
    right, wrong = score_group(task, row, [said(row["example"]["answer"]), said("#### 0")])
    assert right.parts == {"gsm8k/correct": 1.0, "gsm8k/format": 1.0, "gsm8k/reward": 1.1} and right.outcome == "right"
    assert wrong.parts == {"gsm8k/correct": 0.0, "gsm8k/format": 1.0, "gsm8k/reward": 0.1}
    for weights, message in [
        ({"gsm8k": 1}, r"task\.weights has 1 sources \(gsm8k\) and task\.sources 2 \(gsm8k, countdown\)"),
        ({"gsm8k": 1, "countdown": 0}, "each value a number above 0, or null"),
    ]:
        with pytest.raises(UserError, match=message):
            Mixture({"gsm8k": {"task": gsm8k}, "countdown": {"task": puzzles}}, weights)


def test_every_task_has_three_splits_or_says_which(tmp_path):
    wordmath = Wordmath(test_size=20)
    questions = [{row["question"] for row in wordmath.examples(split)} for split in ("validation", "test")]
    assert [len(found) for found in questions] == [20, 20] and not questions[0] & questions[1]
    with pytest.raises(UserError, match="no split 'dev'"):
        wordmath.examples("dev")
    assert (ROOT / "conf" / "task").is_dir()


@pytest.mark.parametrize("task", [calculator, wordmath])
def test_worked_answers_depend_on_the_seed_alone(task):
    assert task.worked_answers(20, 1, hasty=0.5, slips=0.1) == task.worked_answers(20, 1, hasty=0.5, slips=0.1)
    assert task.worked_answers(20, 1) != task.worked_answers(20, 2)


@pytest.mark.parametrize("task", [Calculator, Wordmath])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", (1, 4)), ("steps", (4, 2)), ("steps", (2, 99)), ("steps", (2,)), ("train_size", 0),
        ("test_size", 0), ("largest", 98),
    ],
)  # fmt: skip
def test_bad_arguments_are_told_in_one_line(task, name, value):
    with pytest.raises(UserError) as error:
        task(**{name: value})
    assert f"task.{name}=" in str(error.value) and "\n" not in str(error.value)
