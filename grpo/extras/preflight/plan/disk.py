"""The bytes that a run will write, and whether the disk has room for them."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import lightning as L

from grpo.evaluation.evaluator import Evaluator
from grpo.extras.forecast.parts import Part, human
from grpo.extras.preflight.checked import Checked
from grpo.extras.preflight.probe import Probe
from grpo.rollout.samples_table import records, write
from grpo.system import distributed
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.samples import Samples
from grpo.training.trainer import callbacks_of

ELSEWHERE = "free space there, or set hydra.run.dir to a folder of another disk"


def disk_space(probe: Probe) -> Checked:
    """The disk has room for all checkpoints, policies and tables of samples: a WARN if not, a FAIL if not one checkpoint fits."""
    callbacks, parts = probe.module.trainer.callbacks, probe.parts
    writers = callbacks_of(callbacks, Checkpoint)
    needed = sum(checkpoint_bytes(probe, parts, writer) for writer in writers)
    needed += sum(table_bytes(probe, made.evaluator, callbacks) for made in callbacks_of(callbacks, EvaluationCallback))
    first = sum(sum(sizes(probe, parts, writer)) for writer in writers)
    free = free_bytes(Path(probe.rollouts.folder))
    text = f"the run writes {human(needed)}, {human(free)} are free"
    if first > free:
        return Checked("FAIL", f"{text}, and a checkpoint with its policy takes {human(first)}", ELSEWHERE)
    if needed > free:
        less = "lower callbacks.checkpoint.keep, or raise callbacks.samples.every"
        return Checked("WARN", text, f"checkpoints or tables will be missing: {ELSEWHERE}; {less}")
    return Checked("PASS", text)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not be there yet."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def sizes(probe: Probe, parts: Sequence[Part], writer: Checkpoint) -> tuple[int, int]:
    """Return the bytes of a checkpoint and of a policy. parts: of the memory forecast."""
    trained = sum(p.nbytes for p in probe.module.policy.parameters() if p.requires_grad)
    state = sum(part.size or 0 for part in parts if part.name in ("masters", "optimizer"))
    pieces = distributed.world_size() if distributed.is_sharded(probe.module.policy) else 1
    return trained + (0 if writer.only_model else state * pieces), trained


def checkpoint_bytes(probe: Probe, parts: Sequence[Part], writer: Checkpoint) -> int:
    """Return the size of checkpoints/: those to resume from and the one that is being written, and policies: last, best, the one
    that is being written, and the history."""
    checkpoint, policy = sizes(probe, parts, writer)
    steps = writer.num_rollouts // writer.history if writer.history else 0
    return (writer.keep + 1) * checkpoint + (3 + min(steps, writer.history_keep or steps)) * policy


def times_and_problems(probe: Probe, evaluator: Evaluator) -> tuple[int, int]:
    """Return the number of evaluations of the run, and of problems in each."""
    last = probe.rollouts.plan.num_rollouts
    held_out = [probe.examples[name] for name in evaluator.sources(probe.rollouts.task) if evaluator.every]
    times = sum(evaluator.due(rollout, last) for rollout in range(last + 1))
    return times, sum(len(evaluator.chosen(rows)) for rows in held_out)


def evaluated(probe: Probe, evaluator: Evaluator) -> float:
    """Return the samples of all evaluations of the run, as a number of rollouts."""
    times, problems = times_and_problems(probe, evaluator)
    return times * problems * evaluator.samples / (probe.rollouts.plan.prompts * probe.rollouts.plan.group_size)


def table_bytes(probe: Probe, evaluator: Evaluator, callbacks: Sequence[L.Callback]) -> int:
    """Return the size of all tables of samples, by that of the probe's episodes."""
    plan, writers = probe.rollouts.plan, [samples.every for samples in callbacks_of(callbacks, Samples)]
    tables = sum((plan.num_rollouts / every if every else 0) + evaluated(probe, evaluator) for every in writers)
    if not tables:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(file := Path(folder, "samples.parquet"), records(probe.groups))
        return round(tables * plan.prompts * plan.group_size / len(probe.samples) * file.stat().st_size)
