"""Reinforcement learning in message space: states, actions, trajectories, rewards. No tokens, no tensors.

The slots (`Env`, `EnvBuilder`, `RewardModel`, `Task`) are Protocols: a class fits by its shape and inherits nothing. So are the
records that come out of them (`StateLike`, `RewardLike`), which env/intake.py converts to ours.
"""

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo.env.messages import Message, MessageLike, ToolSpec

Example = Mapping[str, Any]  # one row of a dataset, with whatever columns its task needs
Split = Literal["train", "validation", "test"]
# of grading; the last two leave the answer ungraded
Outcome = Literal["right", "wrong", "no_answer", "timeout", "error"]

# How an episode ended: the environment ended it; it met the limit of turns; it met a limit of tokens, of one answer or of the
# model's context; the environment raised an exception; or it took too long. In the last two the reward is unknown, not 0.
End = Literal["answered", "out_of_turns", "truncated", "env_error", "env_timeout"]


@dataclass(frozen=True)
class State:
    """The policy's observation: the conversation so far, and the tools it may call. prompt: read as it is, in place of the
    messages. stop: texts before which the next message ends. max_tokens: of that message; None: the run's. reward: the part of
    the episode's reward that the action before this state earned; the episode's last action earns the rest."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    reward: float = 0.0


@dataclass(frozen=True)
class Action:
    """The policy's message, whether the limit of tokens cut it short, and if they are known its tokens and its prompt's."""

    message: Message
    truncated: bool = False
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A state and the policy's action in it."""

    state: State
    action: Action


@dataclass(frozen=True)
class Trajectory:
    """One episode, oldest step first. It has no steps if the environment did not start.

    last: the state that the policy would have answered next, if the episode ended before that. error: of an environment
    that failed, in one line. reward: the one that the environment itself gave.
    """

    steps: tuple[Step, ...]
    end: End = "answered"
    last: State | None = None
    error: str | None = None
    reward: "Reward | None" = None

    @property
    def answer(self) -> str:
        """The text of the last action."""
        return self.steps[-1].action.message.content if self.steps else ""

    @property
    def truncated(self) -> bool:
        """Whether the limit of tokens cut the last action short."""
        return self.end == "truncated" or bool(self.steps and self.steps[-1].action.truncated)

    @property
    def failed(self) -> bool:
        """Whether the environment failed, so that there is no reward."""
        return self.end in ("env_error", "env_timeout")

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation."""
        if self.last is not None:
            return self.last.messages
        return (*self.steps[-1].state.messages, self.steps[-1].action.message) if self.steps else ()


@dataclass(frozen=True)
class Reward:
    """The reward of an episode. A NaN `value` is unknown: it stays out of baseline and loss, and is never a 0."""

    value: float  # what is learned from
    correct: bool  # what accuracy counts
    parts: Mapping[str, float] = field(default_factory=dict)  # named numbers that get logged
    outcome: Outcome | None = None  # None where nothing was graded; the shares of the last three get logged
    advantage: float = math.nan  # in place of the estimator's, if it is a number
    extra: Mapping[str, Any] | None = None  # further columns of the table of samples

    @property
    def known(self) -> bool:
        """Whether the value is not NaN."""
        return self.value == self.value


@dataclass(frozen=True)
class Claim:
    """The answer in the place where the reward looks for it (None: there is none), and whether the answer found anywhere in the
    text is right (None: the right answer is unknown)."""

    answer: str | None
    lenient: bool | None


class StateLike(Protocol):
    """Messages may be dicts in the form of chat templates, too. With `tools`, `ToolSpec`s or dicts, the policy may call them."""

    @property
    def messages(self) -> Sequence[MessageLike | Mapping[str, Any]]:
        """The conversation so far."""


class RewardLike(Protocol):
    """May also have the `outcome` of `Reward`."""

    @property
    def value(self) -> float:
        """The number that is learned from; NaN if unknown."""

    @property
    def correct(self) -> bool:
        """Whether accuracy counts the answer as right."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Named numbers to log."""


class Env(Protocol):
    """One episode of one example. Single-use: built, started once, stepped until the episode ends or a limit is met.

    The methods are called in threads, those of many environments at once, and may be coroutines. One that raises or takes
    longer than `step_timeout` ends its episode, and no other. Two are optional: `outcome()` returns the reward of an episode,
    however it ended (None: there is none), and `close()` is called when the episode has been scored, whatever went wrong. With
    `own_prompts = True` a first prompt that the template refuses, or that is too long, ends its episode only, not the run.
    """

    def start(self) -> StateLike | Awaitable[StateLike]:
        """Returns the first state."""

    def step(self, action: Action) -> StateLike | RewardLike | Awaitable[StateLike | RewardLike | None] | None:
        """The next state; when the episode is over, its reward, or None."""


class EnvBuilder(Protocol):
    """Makes environments."""

    def build(self, example: Example) -> Env:
        """A fresh environment. A `build` with a parameter `seed` gets one, for whatever is left to chance: another one for each
        sample, and the same one when a run is resumed. `group_seed` is the same for all samples of an example in a rollout."""


class RewardModel(Protocol):
    """Scores one episode. Called in threads, several at once; may be a coroutine. With a parameter `env` (`envs` of
    `score_group`) it gets the environment in its final state."""

    def score(self, example: Example, trajectory: Trajectory) -> RewardLike | Awaitable[RewardLike]:
        """Returns the reward of one episode."""


class Task(EnvBuilder, RewardModel, Protocol):
    """A dataset, the environment that poses each row of it, and the reward for what comes back: `score`, or `score_group`, which
    compares the samples of an example: `score_group(example, trajectories) -> Sequence[RewardLike]`, one for each, in order. If a
    class defines one and inherits the other, its own is used. With neither, environments give the rewards. Optional methods are
    `claims(example, trajectory) -> Claim | None`, for evaluations (None: no answer is read), `gold(example)`, the right answer,
    and `demonstration(example)`, one to learn from. So is `looks`, how many rows say how long prompts may be."""

    def examples(self, split: Split) -> Sequence[Example]:
        """The rows of a split, read once and cheap to index. Raises UserError where there are none."""


@dataclass
class SingleTurn:
    """The environment of a plain question: one prompt, one answer."""

    messages: tuple[Message, ...]

    def start(self) -> State:
        return State(self.messages)

    def step(self, action: Action) -> State | None:
        return None
