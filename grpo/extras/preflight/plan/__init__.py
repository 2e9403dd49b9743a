"""The plan of a run: how much it samples, learns, evaluates and writes, and how long that takes, known before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import lightning as L

from grpo.evaluation.evaluator import Evaluator
from grpo.extras.forecast.parts import Part, human, largest_phase
from grpo.extras.preflight import learning
from grpo.extras.preflight.plan.disk import checkpoint_bytes, evaluated, table_bytes, times_and_problems
from grpo.extras.preflight.probe import Probe
from grpo.objectives.arguments import function_name
from grpo.system import distributed
from grpo.system.errors import plural
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.trainer import callbacks_of


@dataclass(frozen=True)
class RunPlan:
    """The size of a run. samples: of one rollout. max_tokens: of one completion. passes: over the training rows.

    problems: of one evaluation. rollout_time, update_time, evaluation_time: seconds of the whole run; 0 if nothing was timed.
    memory, disk: bytes; 0 if unknown. devices: share the work; memory is that of one. teacher: in words; empty if there is none.
    """

    rollouts: int
    samples: int
    max_tokens: int
    updates: int
    tokens_per_microbatch: int
    rows: int
    passes: float
    evaluations: int
    problems: int
    memory: int = 0
    disk: int = 0
    rollout_time: float = 0.0
    update_time: float = 0.0
    evaluation_time: float = 0.0
    devices: int = 1
    teacher: str = ""

    @property
    def seconds(self) -> float:
        """The time of the whole run; 0 if nothing was timed."""
        return self.rollout_time + self.update_time + self.evaluation_time

    def lines(self) -> list[str]:
        """Return the plan in words."""
        data = f"{self.passes:.1f} passes over" if self.passes >= 1 else f"{self.passes:.2%} of"
        devices, on_each = (f" on {self.devices} devices", " on each") if self.devices > 1 else ("", "")
        rollouts = f"{plural(self.rollouts, 'rollout')} x {plural(self.samples, 'sample')}"
        work = (
            f"{rollouts} x at most {plural(self.max_tokens, 'token')}, {plural(self.updates, 'update')} in "
            f"microbatches of {self.tokens_per_microbatch:,} tokens{devices}, {data} {plural(self.rows, 'row')}"
        )
        evaluations = f", {plural(self.evaluations, 'evaluation')} of {plural(self.problems, 'problem')}"
        evaluated = evaluations if self.evaluations else ""
        cost = [f"{human(self.memory)} of memory{on_each}"] if self.memory else []
        cost += [f"{human(self.disk)} on disk"] if self.disk else []
        if self.seconds:
            times = {"rollouts": self.rollout_time, "updates": self.update_time, "evaluations": self.evaluation_time}
            parts = ", ".join(f"{name} {part / self.seconds:.0%}" for name, part in times.items() if part)
            cost = [f"about {duration(self.seconds)} ({parts})", *cost]
        return [f"plan: {line}" for line in (f"{work}{evaluated}", self.teacher, ", ".join(cost)) if line]


def duration(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def teacher_words(probe: Probe) -> str:
    """Return a teacher in words, as `teacher: FOLDER, divergence sampled, coef 1`; empty if there is none."""
    if (lessons := getattr(probe.module, "parts", {}).get("teacher")) is None:
        return ""
    teacher, of = lessons.teacher, lessons.teaching
    name = getattr(getattr(teacher, "pretrained", None), "path", type(teacher).__name__.lower())
    return f"teacher: {name}, divergence {function_name(of.divergence)}, coef {of.coef:g}" if of.coef else ""


def plan_of(
    probe: Probe, evaluator: Evaluator, callbacks: Sequence[L.Callback], parts: Sequence[Part], timed: bool
) -> RunPlan:
    """Return the plan of a run. parts: of the memory forecast. timed: play and learn from the probe, to know times and sizes."""
    plan, algorithm = probe.rollouts.plan, probe.rollouts.algorithm
    on_device = [part for part in parts if not part.host or probe.module.device.type == "cpu"]
    train = probe.examples["train"]
    times, problems = times_and_problems(probe, evaluator)
    sized = RunPlan(
        rollouts=plan.num_rollouts,
        samples=plan.prompts * plan.group_size,
        max_tokens=plan.sampling.max_tokens,
        updates=plan.num_rollouts * algorithm.updates_per_rollout,
        tokens_per_microbatch=probe.module.optim.tokens_at_once(probe.module.device.type),
        rows=len(train),
        passes=plan.num_rollouts * plan.prompts / len(train),
        evaluations=times,
        problems=problems,
        memory=largest_phase(on_device),
        disk=sum(checkpoint_bytes(probe, parts, writer) for writer in callbacks_of(callbacks, Checkpoint)),
        devices=distributed.world_size(),
        teacher=teacher_words(probe),
    )
    if not timed:
        return sized
    larger = sized.samples / len(probe.samples)
    seconds = probe.rollout_seconds()
    return replace(
        sized,
        rollout_time=sized.rollouts * seconds,
        update_time=sized.rollouts * larger * learning.seconds(probe) / sized.devices,  # each device learned from all
        evaluation_time=evaluated(probe, evaluator) * seconds,
        disk=sized.disk + table_bytes(probe, evaluator, callbacks),
    )
