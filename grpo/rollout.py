"""Layer 2 - environments played in batches, a group of samples for each example, and scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo import ranks
from grpo.engine import Engine, Sampling
from grpo.errors import UserError
from grpo.renderer import Renderer
from grpo.rl import Action, Example, Reward, Step, Task, Trajectory
from grpo.tokens import Turn


@dataclass(frozen=True)
class Sample:
    """One episode in both views: the trajectory (messages), the turns (tokens), one a step; and what it earned."""

    example: Example
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    reward: Reward

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.completion.ids) for turn in self.turns)


Group = list[Sample]  # the G samples of one example


def sample_means(samples: Sequence[Sample]) -> dict[str, float]:
    """length in tokens, truncated (a share), and every part of the reward by name, over the samples that have it."""
    values: dict[str, list[float]] = {"length": [], "truncated": []}
    for sample in samples:
        named = {"length": sample.length, "truncated": sample.trajectory.truncated, **sample.reward.parts}
        for name, value in named.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(column)) for name, column in values.items()}


@dataclass(frozen=True)
class Plan:
    """A run is `num_rollouts` rollouts of `prompts` prompts with `group_size` samples each."""

    prompts: int
    group_size: int
    num_rollouts: int
    sampling: Sampling

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "num_rollouts"):
            if getattr(self, name) < 1:
                raise UserError(f"rollout.{name}={getattr(self, name)} must be at least 1")
        if self.sampling.temperature == 0:
            raise UserError(
                "rollout.sampling.temperature=0: greedy samples of a prompt are equal, nothing can be learned"
            )


TRAIN, EVALUATION, SHUFFLE = range(3)  # second in the path of a seed: what the noise is for


def derive_seed(*path: int) -> int:
    """A 63-bit seed that depends on every number of the path, as (run, TRAIN, rollout, prompt, sample, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> 1)


def play(
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    seed: Callable[[int, int, int], int],
) -> list[Group]:
    """Play `group_size` episodes of every example, all of them side by side: one batched `sample` a turn.

    seed: (index of the example, index of the sample, turn) to the seed of that one completion. Every rank plays its share of
    the examples. Returns, on each rank, a group for every example, both in order.
    """
    mine = ranks.share(len(examples))
    episodes = [(p, s) for p in mine for s in range(group_size)]
    envs = {episode: task.build(examples[episode[0]]) for episode in episodes}  # never shared: a fresh one a sample
    states = {episode: env.start() for episode, env in envs.items()}
    steps: dict[tuple[int, int], list[Step]] = {episode: [] for episode in episodes}
    turns: dict[tuple[int, int], list[Turn]] = {episode: [] for episode in episodes}
    turn = 0
    while states:
        prompts = [renderer.prompt_ids(state.messages) for state in states.values()]
        completions = engine.sample(prompts, sampling, [seed(*episode, turn) for episode in states])
        following = {}
        for (episode, state), prompt, completion in zip(states.items(), prompts, completions, strict=True):
            action = Action(renderer.parse(completion.ids), truncated=completion.finish == "length")
            steps[episode].append(Step(state, action))
            turns[episode].append(Turn(prompt, completion))
            if (state := envs[episode].step(action)) is not None:
                following[episode] = state
        states = following
        turn += 1

    groups: dict[int, Group] = {p: [] for p in mine}
    for episode in episodes:
        example, trajectory = examples[episode[0]], Trajectory(tuple(steps[episode]))
        groups[episode[0]].append(Sample(example, trajectory, tuple(turns[episode]), task.score(example, trajectory)))
    return ranks.concatenated(list(groups.values()))
