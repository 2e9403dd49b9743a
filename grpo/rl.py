"""Layer 1 - reinforcement learning in message space: states, actions, trajectories, rewards. No tokens, no tensors.

The slots (`Env`, `EnvBuilder`, `RewardModel`, `Task`) are Protocols: a class fits by its shape and inherits nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo.messages import Message

Example = Mapping[str, Any]  # one row of a dataset, with whatever columns its task needs
Split = Literal["train", "validation", "test"]
Outcome = Literal["right", "wrong", "no_answer", "timeout", "error"]  # of grading; in the last two nobody could tell


@dataclass(frozen=True)
class State:
    """What the policy sees: the whole conversation so far."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Action:
    """What the policy said, whether the limit of tokens cut it short, and how many tokens it took."""

    message: Message
    truncated: bool = False
    length: int = 0


@dataclass(frozen=True)
class Step:
    state: State
    action: Action


@dataclass(frozen=True)
class Trajectory:
    """One episode, oldest step first."""

    steps: tuple[Step, ...]

    @property
    def answer(self) -> str:
        """The text of the last action."""
        return self.steps[-1].action.message.content

    @property
    def truncated(self) -> bool:
        return self.steps[-1].action.truncated


@dataclass(frozen=True)
class Reward:
    """What an episode earned. Where nobody could tell, `value` is NaN: out of its group's baseline, without a loss, never a 0."""

    value: float  # what is learned from
    correct: bool  # what accuracy counts
    parts: Mapping[str, float] = field(default_factory=dict)  # named numbers that get logged
    outcome: Outcome | None = None  # None where nothing was graded; the shares of the last three get logged

    @property
    def known(self) -> bool:
        return self.value == self.value


class Env(Protocol):
    """One episode of one example. Single-use: built, started once, stepped until it returns None."""

    def start(self) -> State: ...

    def step(self, action: Action) -> State | None:
        """The next state, or None when the episode is over."""
        ...


class EnvBuilder(Protocol):
    def build(self, example: Example) -> Env: ...


class RewardModel(Protocol):
    """Scores one episode. Called in threads, several at once; may be a coroutine."""

    def score(self, example: Example, trajectory: Trajectory) -> Reward: ...


class GroupRewardModel(Protocol):
    """Scores the samples of an example together, so that it can compare them. Else as RewardModel."""

    def score_group(self, example: Example, trajectories: Sequence[Trajectory]) -> Sequence[Reward]: ...


class Task(EnvBuilder, RewardModel, Protocol):
    """A dataset, the environment that poses each row of it, and the reward for what comes back: `score`, or `score_group`
    (of a class and one it inherits from the class's own counts)."""

    def examples(self, split: Split) -> Sequence[Example]:
        """The rows of a split, read once and cheap to index. Raises UserError where there are none."""
        ...


@dataclass
class SingleTurn:
    """The environment of a plain question: one prompt, one answer."""

    messages: tuple[Message, ...]

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        return None
