"""A task that imports nothing of the project. Each state counts the turns of its environment, so a shared one would show."""

from dataclasses import dataclass, field


@dataclass
class State:
    messages: list[dict[str, str]]


@dataclass
class Reward:
    value: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    advantage: float = 0.25


class Env:
    def __init__(self, number, most):
        self.number, self.most, self.turn, self.messages = number, most, 0, []

    def start(self):
        self.turn += 1
        self.messages.append({"role": "user", "content": f"turn {self.turn} of {self.number}"})
        return State(list(self.messages))

    def step(self, action):
        self.messages.append({"role": "assistant", "content": action.message.content})
        return None if self.turn == self.most else self.start()


class Task:
    def examples(self, split: str):
        return [{"number": number, "most": 1 if number % 2 else 9} for number in range(4)]

    def build(self, example):
        return Env(example["number"], example["most"])

    def score(self, example, trajectory) -> Reward:
        return Reward(len(trajectory.answer) / 100, correct=len(trajectory.answer) > 30)
