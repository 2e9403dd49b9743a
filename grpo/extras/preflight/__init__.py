"""Preflight: checks on the run itself, before the first rollout, that it does what its configuration says.

A check is a function of a `Probe` that returns a `Checked`. Each one measures: it plays episodes, moves weights, takes gradients,
and puts everything back, so that runs with and without preflight have equal numbers.
"""

from collections.abc import Callable

from grpo.extras.preflight import data, episodes, learning, sampling
from grpo.extras.preflight.checked import Checked
from grpo.extras.preflight.plan import disk
from grpo.extras.preflight.probe import Probe

NEEDS = ("forecast", "health")  # the bytes of the plan; whether the demo's model knows the task

CHECKS: dict[str, Callable[[Probe], Checked]] = {
    "the weights are whole": learning.all_weights,
    "prompts differ, answers end": episodes.prompts,
    "prompts have their start token": episodes.begun,
    "tokens are those of the texts": episodes.spelled_out,
    "turns share a row": data.turns,
    "gold answers are right": data.gold,
    "rewards agree with correctness": data.rewards,
    "each sample has its own reward": episodes.owners,
    "there is something to learn": data.signal,
    "held-out rows are new": data.held_out,
    "the mask has every sampled token": learning.mask,
    "tokens have the weights of the loss": learning.weights,
    "log-probabilities agree": sampling.logprobs,
    "draws follow the probabilities": sampling.draws,
    "new weights reach the engine": sampling.sync,
    "the policy starts at its reference": learning.first_pass,
    "the gradient ignores microbatches": learning.gradient,
    "the devices' gradients add up": learning.devices,
    "the disk has room": disk.disk_space,
}
