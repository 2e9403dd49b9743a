"""RowTask: a row of a dataset poses a question, the policy answers in one turn, and reward functions score the answer.

Most tasks are of this kind. Other tasks need nothing from here: see `env.types.Task`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, Protocol

from grpo.data.rows import at
from grpo.env.messages import Message
from grpo.env.types import Claim, Env, Example, Reward, SingleTurn, Split, Trajectory
from grpo.rewards.combined import Rewards, Weights, as_lists, text_of
from grpo.rewards.grader import Grader
from grpo.rewards.resolve import Functions, unwrapped
from grpo.system.errors import UserError
from grpo.system.ranges import as_yaml, require
from grpo.system.seeds import set_states, states_of

log = logging.getLogger(__name__)
LOOKED_AT = 10000  # rows of a split, whose right answers are read when it is loaded
Template = Callable[[str], tuple[Message, ...]]  # from a question to messages


class Rows(Protocol):
    """A source of rows: a dataset of files or of the hub, or generated rows."""

    def split(self, split: Split) -> Sequence[Example]:
        """Return the rows of a split."""


class RowTask:
    """A subclass defines the messages that pose a row's question (`messages`) and its right answer (`gold`).

    rewards, weights, solved: see `Rewards`. The functions get the columns of the row and `gold`.
    """

    gold_column: str | None = "answer"
    usual_weights: Mapping[str, float] = MappingProxyType({})  # by function, where task.weights names none; else 1
    demonstration_column: str | None = None  # of rows that the task makes itself
    stop: str | None = None  # the text with which a base model starts to invent the next question

    def __init__(self, data: Rows, rewards: Functions, weights: Weights = None, solved: float = 1.0) -> None:
        self.graders_warned: set[str] = set()  # splits whose right answers the grader has looked at
        self.tried = False  # whether the reward functions have scored a made-up answer
        self.data, self.rewards = data, Rewards(rewards, weights, solved, self.usual_weights)

    def messages(self, example: Example) -> tuple[Message, ...]:
        """Return the messages that pose a row's question."""
        raise NotImplementedError

    def gold(self, example: Example) -> Any:
        """Return the right answer; None if a row has none. A list of one text counts as that text."""
        gold = None if self.gold_column is None else at(example, self.gold_column)
        return gold[0] if isinstance(gold, list) and len(gold) == 1 and isinstance(gold[0], str) else gold

    def demonstration(self, example: Example) -> Any:
        """Return the answer to learn from that a row has: a text, or messages, the last ones the policy's; None without one."""
        name = getattr(self.data, "demonstration_column", None)
        shown = name and at(example, name)
        return f" {shown}" if self.stop and isinstance(shown, str) else shown  # a base model goes on after "Answer:"

    def examples(self, split: Split) -> Sequence[Example]:
        rows = self.data.split(split)
        self.check(rows[0], split)
        if self.rewards.foreign and not self.tried and not self.several_turns:  # a function may read an environment
            before = deepcopy(self.state_dict())
            self.rewards.try_foreign(self.columns(rows[0]), self.messages(rows[0]))
            self.load_state_dict(before)
            self.tried = True
        if self.grader is not None and split not in self.graders_warned:
            self.graders_warned.add(split)
            self.warn_of_unreadable(self.grader, rows, split)
        return rows

    def warn_of_unreadable(self, grader: Grader, rows: Sequence[Example], where: str) -> None:
        """Warn of right answers that the grader cannot read, by row. where: the name of their source, for the message."""
        golds = [self.gold(row) for row in islice(rows, LOOKED_AT)]
        if places := grader.unreadable([None if gold is None else str(gold) for gold in golds]):
            shown = ", ".join(f"{place + 1} ({str(golds[place])[:40]!r})" for place in places[:5])
            what = "right answers cannot be read: write them as LaTeX, or only the same text has a reward. Rows"
            more = ", ..." if len(places) > 5 else ""
            log.warning("split %r: %d %s %s%s", where, len(places), what, shown, more)

    @property
    def grader(self) -> Grader | None:
        """The grader that one of the reward functions has, as `correct` does; None if none of them has one."""
        graders = (getattr(unwrapped(function), "grader", None) for function in self.rewards.functions)
        return next(filter(None, graders), None)

    def check(self, row: Example, where: str) -> None:
        """Refuse a row that lacks a column that a reward function needs. where: the name of its source, for the message."""
        gold = set() if self.gold(row) is None else {"gold"}
        self.rewards.check({*row} | gold, where)

    def build(self, example: Example) -> SingleTurn:
        return SingleTurn(self.messages(example))

    def columns(self, example: Example) -> Example:
        """Return the columns that reward functions get."""
        return example if self.gold_column is None else {**example, "gold": self.gold(example)}

    def graded_part(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with only the graded part of its text."""
        if self.stop is None:
            return trajectory
        return with_answer(trajectory, trajectory.answer.partition(self.stop)[0])

    @property
    def several_turns(self) -> bool:
        """Whether episodes may have several turns: a subclass has environments of its own."""
        return type(self).build is not RowTask.build

    def score_group(
        self, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Env] = ()
    ) -> list[Reward]:
        """Return a reward for each of the samples of an example. envs: their environments."""
        graded = [self.graded_part(trajectory) for trajectory in trajectories]
        return self.rewards.score(self.columns(example), graded, envs, self.several_turns)

    def score(self, example: Example, trajectory: Trajectory) -> Reward:
        return self.score_group(example, [trajectory])[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the reward functions that have one."""
        return states_of(dict(zip(self.rewards.names, self.rewards.functions, strict=True)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_states(dict(zip(self.rewards.names, self.rewards.functions, strict=True)), state)

    def claims(self, example: Example, trajectory: Trajectory) -> Claim | None:
        """Return the answer that the grader of the rewards reads; None if they have none."""
        if (grader := self.grader) is None:
            return None
        columns = self.columns(example)
        lists = as_lists(columns, [self.graded_part(trajectory)], self.several_turns)
        text = text_of(lists["completions"][0])
        gold = columns.get("gold")
        lenient = None if gold is None else grader.verdict(grader.found(text), str(gold)) == "right"
        return Claim(grader.claimed(text), lenient)


def with_answer(trajectory: Trajectory, text: str) -> Trajectory:
    """Return the trajectory with another text in its last action."""
    *before, last = trajectory.steps
    message = replace(last.action.message, content=text)
    return replace(trajectory, steps=(*before, replace(last, action=replace(last.action, message=message))))


AS_TEXT = ("zero_shot", "one_shot")  # the templates below that a base model continues
NEXT_QUESTION = "\nQuestion:"


def templates(instructions: str, question: str, solution: str) -> dict[str, Template]:
    """Return prompt templates by name: chat and chat_one_shot for a chat model, zero_shot and one_shot as text that a base
    model continues. question and solution: the worked example of the one_shot templates."""
    worked = f"Question: {question}\nAnswer: {solution}\n\n"

    def ask(text: str) -> Message:
        return Message("user", f"{text}\n\n{instructions}")

    def texts_only(template: Template) -> Template:
        def messages(text: Any) -> tuple[Message, ...]:
            if not isinstance(text, str):
                raise UserError(f"the question {as_yaml(text)[:80]} is no text: every row needs one")
            return template(text)

        return messages

    forms = {
        "chat": lambda text: (ask(text),),
        "chat_one_shot": lambda text: (ask(question), Message("assistant", solution), ask(text)),
        "zero_shot": lambda text: (Message("user", f"{instructions}\n\nQuestion: {text}\nAnswer:"),),
        "one_shot": lambda text: (Message("user", f"{instructions}\n\n{worked}Question: {text}\nAnswer:"),),
    }
    return {name: texts_only(template) for name, template in forms.items()}


def chosen(prompts: Mapping[str, Any], name: str) -> Any:
    """Return the template that task.prompt names."""
    require("task.prompt", name, Literal[*sorted(prompts)])
    return prompts[name]
