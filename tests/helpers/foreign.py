"""One class for each slot, written without this project: nothing of it is imported here.

The policy is a list of answers, the vocabulary a string of characters. The environment asks for two answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

VOCABULARY = "\n><0123456789+=? abcdefghijklmnopqrstuvwxyz"  # a line feed ends what the policy says


class Text(Protocol):
    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class Said(Protocol):
    @property
    def message(self) -> Text: ...


class Episode(Protocol):
    @property
    def answer(self) -> str: ...


class Limit(Protocol):
    @property
    def max_tokens(self) -> int: ...


@dataclass
class Message:
    role: str
    content: str


@dataclass
class State:
    messages: list[Text | dict[str, str]]


@dataclass
class Reward:
    value: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Completion:
    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


class Env:
    def __init__(self, question: str) -> None:
        self.messages: list[Text | dict[str, str]] = [Message("user", question)]
        self.asked = 1

    def start(self) -> State:
        return State(list(self.messages))

    def step(self, action: Said) -> State | None:
        if self.asked == 2:
            return None
        self.asked += 1
        self.messages += [action.message, {"role": "user", "content": "sure?"}]
        return State(list(self.messages))


class AsyncEnv:
    def __init__(self, question: str) -> None:
        self.env = Env(question)

    async def start(self) -> State:
        return self.env.start()

    async def step(self, action: Said) -> State | None:
        return self.env.step(action)


class Builder:
    def build(self, example: Mapping[str, Any]) -> Env | AsyncEnv:
        return AsyncEnv(example["question"]) if example["waits"] else Env(example["question"])


class Judge:
    async def score(self, example: Mapping[str, Any], trajectory: Episode) -> Reward:
        right = trajectory.answer == example["answer"]
        return Reward(2.0 if right else -1.0, right, {"letters": float(len(trajectory.answer))})


class Task(Builder, Judge):
    def examples(self, split: str) -> list[dict[str, Any]]:
        waits = {"question": "2+2?", "answer": "4", "waits": True}
        return [{"question": "1+2?", "answer": "3", "waits": False}, waits]


def ids_of(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


class Renderer:
    def prompt_ids(
        self, messages: Sequence[Text], tools: Sequence[object] = (), before: Sequence[int] = ()
    ) -> list[int]:
        text = "<"
        for message in reversed(messages):
            text = {"user": ">", "assistant": "<"}[message.role] + message.content + "\n" + text
        return ids_of(text)  # a token is a character: the ids begin with `before` if the text does

    def parse(self, ids: Sequence[int], tools: Sequence[object] = ()) -> Message:
        return Message("assistant", "".join(VOCABULARY[i] for i in ids).rstrip("\n"))


class Engine:
    """A seed is the index of its answer; the n-th token of an answer has a log-probability of -n/4."""

    context = 23

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers, self.version, self.prompts = answers, -1, list[list[int]]()

    def load_weights(self, model: object, version: int) -> None:
        self.version = version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Limit,
        seeds: Sequence[int],
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        self.prompts += map(list, prompts)
        completions = [self.answer(seed, sampling.max_tokens) for seed in seeds]
        if done is not None:
            for place in reversed(range(1, len(prompts))):  # the first is only in the returned list
                done(place, completions[place])
        return completions

    def answer(self, seed: int, most: int) -> Completion:
        ids = ids_of(self.answers[seed] + "\n")
        logprobs = [-n / 4 for n in range(1, len(ids) + 1)]
        return Completion(ids[:most], logprobs[:most], "stop" if len(ids) <= most else "length")

    def close(self) -> None:
        self.version = -1
