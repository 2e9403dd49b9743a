"""Health: warns once when a metric leaves the range of healthy runs, says what to do, and stops a run that has gone wrong."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn import Module

from grpo.env.types import Task
from grpo.extras.health.watch import Bounds, Watch
from grpo.system.errors import AlarmError, UserError, plural
from grpo.system.loading import not_finite
from grpo.system.metrics import WATCHED, require_metric
from grpo.system.ranges import require
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)

Alarms = Literal["stop", "warn"]


class Health(L.Callback):
    """Warns about metrics. It comes after RolloutCallback, which collects them, and before Checkpoint.

    ignore: metrics without warnings. alarms: stop: a metric beyond its last bound, or a weight or a number of the optimizer that
    is not finite, ends the run with exit code 4, before a checkpoint is written. warn: it is a warning. bounds: by metric, `low`,
    `high`, `after` and `stop` in place of the dictionary's.
    """

    def __init__(self, ignore: tuple[str, ...] = (), alarms: Alarms = "stop", bounds: Bounds | None = None) -> None:
        require("alarms", alarms, Alarms)
        require("callbacks.health.bounds", bounds, Bounds | None)
        for name in bounds or ():
            require_metric("callbacks.health.bounds", name)
        names = [metric.name for metric in WATCHED]
        if isinstance(ignore, str) or not set(ignore) <= set(names):
            raise UserError(f"callbacks.health.ignore={ignore} must be a list of names among {', '.join(names)}")
        self.ignored, self.alarms = frozenset(ignore), alarms
        self.watch = Watch(own={name: dict(own) for name, own in (bounds or {}).items()})
        self.watch.silent |= self.ignored
        self.alarmed: set[str] = set()  # metrics that have passed the bound that stops a run
        self.measured_with: list[str] | None = None  # what the rounding depends on: engine, number type, precision
        self.foreign: str | None = None  # a line for a tiny model that knows another task

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in callbacks_of(trainer.callbacks, RolloutCallback):
            measured_with = [type(callback.engine).__name__, str(module.policy.dtype), str(trainer.precision)]
            same = self.measured_with in (None, measured_with)
            self.watch.rounding = callback.rounding or (self.watch.rounding if same else None)
            self.measured_with = measured_with
            self.watch.bound = callback.plan.most_stale
            self.foreign = untaught(module.policy, callback.rollouts.task)

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        if batch.groups and module.algorithm.mask_truncated:
            truncated = [sample.trajectory.truncated for group in batch.groups for sample in group]
            batch.metrics["rollout/filtered"] = sum(truncated) / len(truncated)
        intervals = {evaluation.rollout: evaluation.estimates["accuracy"][1:3] for evaluation in batch.evaluations}
        rows = {evaluation.rollout: evaluation.metrics for evaluation in batch.evaluations}
        rows |= {batch.rollout + 1: batch.metrics}
        for rollouts, row in rows.items():
            for finding in self.watch.findings(rollouts, row, intervals.get(rollouts)):
                line = f"rollout {finding.rollout}: {finding.metric} is {finding.value:.3g}, {finding.words}"
                if finding.stops and finding.metric not in self.alarmed | self.ignored:
                    self.alarmed.add(finding.metric)
                    self.alarm(line)
                elif not finding.stops:
                    warn(line)
        starts = [evaluation for evaluation in batch.evaluations if evaluation.rollout == 0]
        if starts and starts[0].metrics.get("eval/accuracy") == 0 and self.foreign:
            warn(f"rollout 0: no held-out answer is right: {self.foreign}")
        if wrong := not_finite(chain(learned(module), states(trainer))):
            self.alarm(
                f"rollout {batch.rollout + 1}: values of {plural(len(wrong), 'tensor')} of policy and optimizer are not finite, "
                f"the first is {wrong[0]}: resume from the last checkpoint with a lower optim.optimizer.lr"
            )

    def alarm(self, line: str) -> None:
        """Stop the run, or only warn."""
        if self.alarms == "stop":
            raise AlarmError(f"{line} (alarms=warn trains on)")
        warn(line)

    def warned(self) -> list[str]:
        """Return the metrics that had a warning, including those before the run was resumed."""
        return sorted(self.watch.silent - self.ignored)

    def state_dict(self) -> dict:
        own = {"silent": self.warned(), "unwell": dict(self.watch.unwell), "measured_with": self.measured_with}
        return asdict(self.watch) | own

    def load_state_dict(self, state: dict) -> None:
        self.measured_with = state.get("measured_with")
        silent, unwell = {*state["silent"]} | self.ignored, Counter(state.get("unwell", {}))
        watch = {name: value for name, value in state.items() if name != "measured_with"}
        self.watch = Watch(**watch | {"silent": silent, "unwell": unwell, "own": self.watch.own})


def untaught(policy: Module, task: Task | None) -> str | None:
    """Return what to do if the policy is the demo's, which knows one task alone, and this one seems to be another; else None."""
    folder = getattr(getattr(policy, "config", None), "name_or_path", "")
    if not (recipe := Path(folder) / "recipe.json").is_file():
        return None
    taught = json.loads(recipe.read_text(encoding="utf-8")).get("taught", "one task")
    if taught == type(task).__module__:
        return None
    what = f"model=tiny was trained on {taught} alone"
    return f"{what}: give another task its warm_start (docs/tasks.md), or take another model"


def learned(module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that the run trains."""
    return ((name, p) for name, p in module.policy.named_parameters() if p.requires_grad)


def states(trainer: L.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the optimizers' states."""
    for optimizer in trainer.optimizers:
        for i, state in enumerate(optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{name} of parameter {i}", value


@rank_zero_only
def warn(line: str) -> None:
    """Log a warning, once for all devices: they see the same metrics."""
    log.warning(line)
