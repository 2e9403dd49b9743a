"""Environments of gymnasium, TextArena and OpenEnv: task=gym task.make=gymnasium:FrozenLake-v1. The reward is their own."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import isawaitable
from typing import Any

from grpo.data.rows import Made
from grpo.env.messages import Message
from grpo.env.types import Action, Example, Reward, Split, State
from grpo.rewards.resolve import imported
from grpo.system.ranges import FunctionName
from grpo.system.seeds import own_randomness


class Gym:
    """make: LIBRARY:NAME for the library's `make`, or a class by FILE.py:NAME or a dotted path; `arguments` are for it.

    prompt: text before the first observation. observe: from (environment, observation) to a text; by default the drawing of
    render_mode=ansi, else the observation. actions: the words of the actions 0, 1, ...; the last one in a message counts. act:
    from a message to an action. Without both the message is the action. solved: the sum of rewards that counts as right.
    """

    def __init__(
        self,
        make: str,
        arguments: Mapping[str, Any] | None = None,
        prompt: str = "",
        actions: Sequence[str] = (),
        observe: FunctionName | None = None,
        act: FunctionName | None = None,
        solved: float = 1.0,
    ) -> None:
        library, _, name = make.partition(":")
        of_the_user = ".py:" in make or not name
        maker = imported(make, "task.make") if of_the_user else partial(import_module(library).make, name)
        self.make = partial(maker, **(arguments or {}))
        self.prompt, self.actions, self.solved = prompt, actions, solved
        self.observe = imported(observe, "task.observe") if observe else drawn
        self.act = self.chosen if actions else str
        if act:
            self.act = imported(act, "task.act")

    def examples(self, split: Split) -> Sequence[Example]:
        if split == "train":
            return Made(20000, lambda i: {"seed": i})
        return Made(200, lambda i: {"seed": 10**6 + i})

    def build(self, example: Example) -> "Episode":
        return Episode(self, example["seed"])

    def chosen(self, text: str) -> int:
        """Return the action that a message names last; the first one if it names none."""
        longest_first = sorted(self.actions, key=len, reverse=True)  # a word may begin another one
        named = re.findall("|".join(map(re.escape, longest_first)), text)
        return self.actions.index(named[-1]) if named else 0


def drawn(env: Any, observation: Any) -> str:
    """Return what an environment draws, else the observation as text. A coloured letter gets brackets."""
    picture = env.render() if getattr(env, "render_mode", None) == "ansi" else observation
    return re.sub(r"\x1b\[4\dm(.)\x1b\[0m", r"[\1]", str(picture)).strip()


class Episode:
    """A user's message is what the environment shows; the policy's message is the action."""

    def __init__(self, task: Gym, seed: int) -> None:
        self.task, self.seed, self.messages, self.total, self.env = task, seed, (), 0.0, None

    async def start(self) -> State | Reward:
        with own_randomness():
            self.env = self.task.make()
        self.arena = hasattr(self.env, "get_observation")  # TextArena
        return await self.called(self.env.reset, seed=self.seed, **({"num_players": 1} if self.arena else {}))

    async def step(self, action: Action) -> State | Reward:
        self.messages += (action.message,)
        return await self.called(self.env.step, self.task.act(action.message.content))

    async def called(self, function: Any, *arguments: Any, **more: Any) -> State | Reward:
        """Call reset or step, and return the next state, or the reward at the end."""
        with own_randomness():
            result = function(*arguments, **more)
        if isawaitable(result):
            result = await result
        if hasattr(result, "observation"):  # OpenEnv
            seen, reward, over = result.observation, result.reward, result.done
        elif self.arena:
            over = bool(result and result[0])
            seen, reward = (None, self.env.close()[0][0]) if over else (self.env.get_observation()[1], 0.0)
        elif arguments:  # gymnasium's step: observation, reward, terminated, truncated, information
            seen, reward, over = result[0], result[1], any(result[2:4])
        else:  # gymnasium's reset: observation, information
            seen, reward, over = result[0], 0.0, False
        self.total += float(reward or 0.0)
        if over:
            return self.outcome()
        text = self.task.observe(self.env, seen)
        self.messages += (Message("user", text if self.messages else f"{self.task.prompt}\n{text}".strip()),)
        return State(self.messages)

    def outcome(self) -> Reward:
        return Reward(self.total, self.total >= self.task.solved)

    def close(self) -> Any:
        return None if self.env is None or self.arena else self.env.close()
