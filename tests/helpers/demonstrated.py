"""A rollout on word problems that have demonstrations, and a module that learns from both in place of a trainer."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from conftest import seed

from grpo.engines.protocol import Sampling
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.teachers.demonstrations import Beside, Demonstrations
from grpo.extras.teachers.kinds import Teacher
from grpo.extras.teachers.module import Lessons
from grpo.extras.teachers.teaching import Imitation
from grpo.objectives.loss import clip
from grpo.rollout.collate import collate, scores
from grpo.rollout.types import Group, Limits, Sample
from grpo.training.batch import RolloutBatch
from grpo.training.module import GRPOModule
from helpers.learning import as_given, make_module
from tasks.wordmath import Wordmath

TASK = Wordmath(train_size=8, test_size=4)
MOST = 64  # new tokens of an answer


def demonstrated(parts, task=TASK, count: int = 3, most: int = MOST) -> list[Group]:
    """Return the demonstrations of the first training rows, played in place of samples."""
    rows = task.examples("train")
    return Demonstrations().play(task, [rows[i] for i in range(count)], 1, *parts, Sampling(most), seed, Limits())


def sampled(parts, task=TASK, count: int = 3, size: int = 2) -> list[Group]:
    """Return groups of made-up answers to the first training rows."""
    rng, (_, renderer), groups = torch.Generator().manual_seed(0), parts, []
    for example in (task.examples("train")[i] for i in range(count)):
        state = State(task.build(example).start().messages)
        prompt, group = tuple(renderer.prompt_ids(state.messages)), []
        for _ in range(size):
            ids = tuple(torch.randint(30, 90, (int(torch.randint(2, 7, (), generator=rng)),), generator=rng).tolist())
            action = Action(renderer.parse(ids), False, ids)
            turn = Turn(prompt, Completion(ids, (-0.5,) * len(ids), "stop"))
            group.append(Sample(example, Trajectory((Step(state, action),)), (turn,), Reward(0.0, False)))
        groups.append(group)
    return groups


def batch(groups: list[Group], rewards: torch.Tensor | None = None) -> RolloutBatch:
    scored = scores(groups)
    scored = scored if rewards is None else replace(scored, rewards=rewards)
    return RolloutBatch(0, groups=groups, tokens=collate(groups), scores=scored)


def taught(policy, parts, teacher: Teacher | None = None, task=TASK, imitation: Imitation | None = None, **settings):
    """Return a module that learns from a rollout with plain gradient steps."""

    class WithoutTrainer(Lessons):
        shows = None  # evaluations are a trainer's
        rollouts = SimpleNamespace(task=task, renderer=parts[1], plan=SimpleNamespace(sampling=Sampling(MOST)))

    chosen = {"advantage": as_given, "surrogate": clip, "max_tokens": MOST, "reduce": "token", "lr": 1.0}
    return make_module(
        policy,
        parts={"teacher": WithoutTrainer(teacher or Beside())},
        imitation=imitation or Imitation(),
        **chosen | settings,
    )


def moved(policy, module: GRPOModule, rollout: RolloutBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient of the rollout's loss, as one vector, and the metrics."""
    policy.zero_grad()
    before = [p.detach().clone() for p in policy.parameters()]
    metrics = module.training_step(rollout, 0)
    pairs = [*zip(before, policy.parameters(), strict=True)]
    with torch.no_grad():
        gradient = torch.cat([(start - now).flatten() for start, now in pairs])
        for start, now in pairs:
            now.copy_(start)
    return gradient, metrics
