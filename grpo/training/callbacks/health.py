"""Health: warns once when a metric leaves the range of healthy runs, says what to do, and stops a run that has gone wrong."""

import logging
from typing import Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.runs.health import Watch
from grpo.system.errors import AlarmError, UserError
from grpo.system.loading import not_finite
from grpo.system.metrics import WATCHED
from grpo.system.ranges import require
from grpo.training.batch import RolloutBatch

log = logging.getLogger(__name__)

Alarms = Literal["stop", "warn"]


class Health(L.Callback):
    """Warns about metrics. It comes after RolloutCallback, which collects them, and before Checkpoint.

    ignore: metrics without warnings. alarms: stop: a metric beyond its last bound, or a weight that is not finite, ends the run
    with exit code 4, before a checkpoint is written. warn: it is a warning.
    """

    def __init__(self, ignore: tuple[str, ...] = (), alarms: Alarms = "stop") -> None:
        require("alarms", alarms, Alarms)
        known = [metric.name for metric in WATCHED]
        if isinstance(ignore, str) or not set(ignore) <= set(known):
            raise UserError(f"callbacks.health.ignore={ignore} must be a list of names among {', '.join(known)}")
        self.ignored, self.watch, self.alarms = frozenset(ignore), Watch(), alarms
        self.watch.silent |= self.ignored

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        for found in self.watch.findings(batch.rollout + 1, batch.metrics):
            line = f"rollout {found.rollout}: {found.metric} is {found.value:.3g}, {found.words}"
            if found.stops and found.metric not in self.ignored:
                self.alarm(line)
            else:
                log.warning(line)
        learned = ((name, p) for name, p in module.policy.named_parameters() if p.requires_grad)
        if wrong := not_finite(learned):
            self.alarm(
                f"rollout {batch.rollout + 1}: {len(wrong)} of the policy's tensors are not finite, the first is {wrong[0]}: "
                "resume from the last checkpoint with a lower optim.optimizer.lr"
            )

    def alarm(self, line: str) -> None:
        """Stop the run, or only warn."""
        if self.alarms == "stop":
            raise AlarmError(f"{line} (alarms=warn trains on)")
        log.warning(line)

    def warned(self) -> list[str]:
        """Return the metrics that had a warning, including those before the run was resumed."""
        return sorted(self.watch.silent - self.ignored)

    def state_dict(self) -> dict:
        return {"silent": sorted(self.watch.silent)}

    def load_state_dict(self, state: dict) -> None:
        self.watch.silent |= set(state["silent"])
