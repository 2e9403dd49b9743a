"""Environments of skyrl-gym with rows of a dataset in SkyRL's form: task=skyrl_gym task.path=FILE.parquet task.env=gsm8k."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from grpo.env.messages import message_of
from grpo.env.types import Action, Example, Reward, Split, State
from grpo.extras.datasets.dataset import Dataset


class SkyRL:
    """env: the environment's name in the library; null: the row's column env_class. settings: its own. solved: the sum of
    rewards from which an episode counts as right. rows: further arguments of `Dataset`. A row has `prompt`, a list of messages,
    and whatever the environment asks for, such as reward_spec."""

    def __init__(
        self,
        path: str,
        env: str | None = None,
        settings: Mapping[str, Any] | None = None,
        solved: float = 1.0,
        **rows: Any,
    ) -> None:
        self.env, self.config, self.solved = env, dict(settings or {}), solved
        self.data = Dataset(path, ("prompt",), **rows)

    def examples(self, split: Split) -> Sequence[Example]:
        return self.data.split(split)

    def build(self, example: Example) -> "SkyRLEpisode":
        make = import_module("skyrl_gym").make  # here, since it need not be installed
        env = make(self.env or example["env_class"], env_config=self.config, extras=dict(example))
        return SkyRLEpisode(env, example["prompt"], self.solved)


class SkyRLEpisode:
    """An episode in an environment of the library."""

    def __init__(self, env: Any, prompt: Sequence[Mapping[str, str]], solved: float) -> None:
        self.env, self.prompt, self.solved, self.total = env, prompt, solved, 0.0
        self.close = env.close

    def start(self) -> State:
        self.messages = tuple(map(message_of, self.env.init(list(self.prompt))[0]))
        return State(self.messages)

    def step(self, action: Action) -> State | Reward:
        result = self.env.step(action.message.content)
        self.total += float(result["reward"])
        self.messages += (action.message, *map(message_of, result["observations"]))
        return self.outcome() if result["done"] else State(self.messages)

    def outcome(self) -> Reward:
        return Reward(self.total, self.total >= self.solved)
