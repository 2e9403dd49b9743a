"""Puts the classes of `foreign` into the slots: nothing to run, mypy reads it (see `test_types`)."""

from grpo.engines.protocol import Engine
from grpo.env.messages import MessageLike
from grpo.env.rendering import Renderer
from grpo.env.tokens import CompletionLike
from grpo.env.types import Env, EnvBuilder, RewardLike, RewardModel, StateLike, Task
from helpers import foreign

message: MessageLike = foreign.Message("user", "1+2?")
state: StateLike = foreign.State([])
reward: RewardLike = foreign.Reward(1.0, True)
completion: CompletionLike = foreign.Completion([], [], "stop")

env: Env = foreign.Env("1+2?")
async_env: Env = foreign.AsyncEnv("1+2?")
builder: EnvBuilder = foreign.Builder()
judge: RewardModel = foreign.Judge()
task: Task = foreign.Task()
renderer: Renderer = foreign.Renderer()
engine: Engine = foreign.Engine(["3"])
