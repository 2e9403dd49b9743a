"""Quizzes: several sums, one a turn, with a reward for each. Their difficulty varies widely, and rambling costs.

user       3 +5 -2 -4
assistant  3+5=8
           8-2=6
           6-4=2
           \\boxed{2}

The operations apply from left to right. All sums of a quiz have the same number of operations. Each stands on a page of its own:
the policy does not see the earlier ones. Each right answer earns 1 divided by the number of sums. An answer that max_tokens cuts
short ends the quiz, so the later sums earn nothing.
"""

import random
from collections.abc import Sequence
from functools import cached_property

from grpo.data.rows import Made
from grpo.env.messages import Message
from grpo.env.types import Action, Example, Reward, Split, State
from grpo.extras.grading.answers import extract_answer
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Whole, enforced
from tasks.wordmath import OPERATORS, Problem, side

SUMS = 3  # of a quiz
OPERATIONS = (1, 4)  # of a sum, fewest and most
RAMBLING = 0.35  # probability of a needless line, and then of another one, ...


def draw(rng: random.Random, operations: int) -> Problem:
    """Return a sum. All numbers in it and in its working have one digit, and no earlier number is its result by chance."""
    while True:
        values, sums = [rng.randint(0, 9)], []
        while len(sums) < operations:
            sign, n = rng.choice("+-"), rng.randint(1, 9)
            value = OPERATORS[sign](values[-1], n)
            if 0 <= value <= 9:
                sums.append((sign, n, None))
                values.append(value)
        if values[-1] not in values[:-1]:
            question = " ".join([str(values[0]), *(f"{sign}{n}" for sign, n, _ in sums)])
            return Problem(question, values[0], tuple(sums))


def draw_quiz(
    split: Split, rng: random.Random, sums: int = SUMS, operations: Sequence[int] = OPERATIONS
) -> list[Problem]:
    """Return the sums of a quiz. All belong to the split: no sum is in both train and test."""
    length = rng.randint(*operations)
    quiz: list[Problem] = []
    while len(quiz) < sums:
        problem = draw(rng, length)
        if side(problem.question) == split:
            quiz.append(problem)
    return quiz


def answer(problem: Problem, rng: random.Random, hasty: float, slips: float) -> str:
    """Return an author's answer. A sum of one operation is worked out with care. With more, a hasty author may stop after any
    line; one who reaches the end may ramble there."""
    if len(problem.sums) == 1:
        return problem.worked(rng)[0]
    written: list[str] = []
    for line, result in problem.lines(rng, slips):
        if written and rng.random() < hasty:
            break
        written.append(line)
        value = result
    else:
        while hasty and rng.random() < RAMBLING:
            written.append(f"{value}+0={value}")
    return "\n".join([*written, f"\\boxed{{{value}}}"])


def worked_answers(count: int, seed: int, hasty: float = 0.0, slips: float = 0.0) -> list[State]:
    """Return sums of the train side with their answers, to warm up a model. hasty, slips: as in tasks.wordmath."""
    rng = random.Random(f"quiz {seed}")
    problems = (draw_quiz("train", rng, 1)[0] for _ in range(count))
    turns = ((problem.question, answer(problem, rng, hasty, slips)) for problem in problems)
    return [State((Message("user", question), Message("assistant", text))) for question, text in turns]


class Quiz:
    """sums: of a quiz. operations: of a sum, the fewest and the most, inclusive. There are as many validation as test rows."""

    @enforced("task")
    def __init__(
        self,
        sums: Count = SUMS,
        operations: tuple[Count, Count] = OPERATIONS,
        train_size: Count = 20000,
        test_size: Count = 500,
        seed: Whole = 0,
    ) -> None:
        if operations[0] > operations[1]:
            raise UserError(f"task.operations={list(operations)} must be [fewest, most] with fewest <= most")
        self.sums, self.operations, self.seed = sums, tuple(operations), seed
        self.train_size, self.test_size = train_size, test_size

    def examples(self, split: Split) -> Sequence[Example]:
        if split == "train":
            return Made(self.train_size, lambda i: self.row("train", i))
        return self.held_out[split]

    def row(self, split: Split, place: int) -> Example:
        """Return row `place` of the train or the test side."""
        quiz = draw_quiz(split, random.Random(f"{split} {self.seed} {place}"), self.sums, self.operations)
        questions = [problem.question for problem in quiz]
        answers = [str(problem.worked(random.Random(0))[1]) for problem in quiz]
        return {"questions": questions, "answers": answers, "steps": len(quiz[0].sums)}

    @cached_property
    def held_out(self) -> dict[Split, Sequence[Example]]:
        """The first rows of the test side for test, and as many after them for validation."""
        rows = [self.row("test", i) for i in range(2 * self.test_size)]
        return {"test": rows[: self.test_size], "validation": rows[self.test_size :]}

    def gold(self, example: Example) -> str:
        """Return the right answers."""
        return ", ".join(example["answers"])

    def build(self, example: Example) -> "Episode":
        return Episode(example["questions"], example["answers"])


class Episode:
    """One quiz. Its reward is the share of right answers; it is correct if all are right."""

    def __init__(self, questions: Sequence[str], answers: Sequence[str]) -> None:
        self.questions, self.answers = questions, answers
        self.right: list[bool] = []

    def next_state(self) -> State:
        """Return the state with the next question, and the reward of the answer before it."""
        earned = self.right[-1] / len(self.answers) if self.right else 0.0
        return State((Message("user", self.questions[len(self.right)]),), reward=earned)

    def start(self) -> State:
        return self.next_state()

    def step(self, action: Action) -> State | Reward:
        self.right.append(extract_answer(action.message.content) == self.answers[len(self.right)])
        if action.truncated or len(self.right) == len(self.answers):
            return Reward(sum(self.right) / len(self.answers), sum(self.right) == len(self.answers))
        return self.next_state()
