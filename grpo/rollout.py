"""Layer 2 - environments played in batches, a group of samples for each example, and scored."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo import ranks
from grpo.engine import Engine, Sampling
from grpo.errors import RewardError, UserError
from grpo.messages import Message
from grpo.renderer import Renderer
from grpo.rl import Action, Env, Example, Reward, Step, Task, Trajectory
from grpo.scoring import TIMEOUT, Scoring, check_timeout
from grpo.tokens import Completion, Turn


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
    """length in tokens; shares: truncated, and where anything was graded no_answer, timeout and error; and every part of the
    reward by name, over the samples that have it."""
    told = ("no_answer", "timeout", "error") if any(sample.reward.outcome for sample in samples) else ()
    values: dict[str, list[float]] = {}
    for sample in samples:
        outcomes = {name: sample.reward.outcome == name for name in told}
        ours = {"length": sample.length, "truncated": sample.trajectory.truncated, **outcomes}
        for name, value in {**sample.reward.parts, **ours}.items():  # no part of a reward takes our names
            values.setdefault(name, []).append(value)
    first = ["length", "truncated", *told]
    return {name: float(np.mean(values[name])) for name in [*first, *sorted(values.keys() - first)]}


def share_right(samples: Sequence[Sample]) -> float:
    """Of those whose reward is known; NaN if none is."""
    known = [sample.reward.correct for sample in samples if sample.reward.known]
    return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Plan:
    """A run is `num_rollouts` rollouts of `prompts` prompts with `group_size` samples each.

    score_timeout: seconds for one call of the task's reward; what takes longer is unknown, not 0.
    """

    prompts: int
    group_size: int
    num_rollouts: int
    sampling: Sampling
    score_timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        check_timeout("rollout.score_timeout", self.score_timeout)
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


class _Episode:
    """One environment and what has happened in it so far."""

    def __init__(self, env: Env) -> None:
        self.env, self.state = env, env.start()
        self.steps: list[Step] = []
        self.turns: list[Turn] = []

    def act(self, prompt_ids: tuple[int, ...], completion: Completion, message: Message) -> None:
        action = Action(message, completion.finish == "length", len(completion.ids))
        self.steps.append(Step(self.state, action))
        self.turns.append(Turn(prompt_ids, completion))
        self.state = self.env.step(action)


def play(
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    seed: Callable[[int, int, int], int],
    score_timeout: float = TIMEOUT,
) -> list[Group]:
    """Play `group_size` episodes of every example, all of them side by side: one batched `sample` a turn.

    seed: (index of the example, index of the sample, turn) to the seed of that one completion. Every rank plays its share of
    the examples. A group is scored as soon as its last episode is over, while others go on. Returns, on each rank, a group
    for every example, both in order. Raises RewardError, with the groups as far as they got, where a reward fails.
    """
    mine = ranks.share(len(examples))
    # never shared: a fresh environment a sample
    played = {p: [_Episode(task.build(examples[p])) for _ in range(group_size)] for p in mine}

    def trajectories(p: int) -> list[Trajectory]:
        return [Trajectory(tuple(episode.steps)) for episode in played[p]]

    def one_turn(active: list[tuple[int, int]], turn: int, scoring: Scoring) -> None:
        prompts = [renderer.prompt_ids(played[p][s].state.messages) for p, s in active]
        taken = set()

        def take(i: int, completion: Completion) -> None:
            p, s = active[i]
            taken.add(i)
            played[p][s].act(prompts[i], completion, renderer.parse(completion.ids))
            if all(episode.state is None for episode in played[p]):
                scoring.start(p, examples[p], trajectories(p))

        completions = engine.sample(prompts, sampling, [seed(p, s, turn) for p, s in active], take)
        for i, completion in enumerate(completions):
            if i not in taken:  # an engine need not tell of each as it comes
                take(i, completion)

    with Scoring(task, score_timeout) as scoring:
        turn = 0
        while active := [(p, s) for p in mine for s in range(group_size) if played[p][s].state is not None]:
            one_turn(active, turn, scoring)
            turn += 1
        rewards, errors = scoring.finish()

    groups: list[Group] = []
    for p in mine:
        earned = [*rewards[p], *[Reward(math.nan, False)] * group_size]  # a group whose reward failed may have fewer
        groups.append(
            [
                Sample(examples[p], trajectory, tuple(episode.turns), reward)
                for trajectory, episode, reward in zip(trajectories(p), played[p], earned, strict=False)
            ]
        )
    groups = ranks.concatenated(groups)
    failed = ranks.concatenated([(p, str(error), error.sample) for p, error in errors.items()])
    if failed:
        p, message, s = failed[0]
        place = f"prompt_index {p}" + ("" if s is None else f", sample {s}")
        raise RewardError(f"{message}; it was scoring {place}", s, groups) from errors.get(p)
    return groups
