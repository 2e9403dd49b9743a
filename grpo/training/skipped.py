"""Updates that were skipped because their gradient is not finite: they are counted, and written so that they can be repeated."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.training.checkpoints import PlainCheckpoints

log = logging.getLogger(__name__)

KEPT = 3  # updates that a run writes: each has the trained weights


class Skipped:
    """Notes the skipped updates of a run. Mutable: `row` counts those in a row.

    folder: where the first KEPT are written. most: the run ends after so many in a row.
    """

    def __init__(self, folder: str, most: int) -> None:
        self.folder, self.most, self.row = Path(folder), most, 0

    def note(self, position: Mapping[str, Any], policy: nn.Module, minibatch: TokenBatch) -> None:
        """Write an update that was skipped: what `replay` needs to repeat it. Raises UserError if it is one too many.

        position: see `ModuleState.position`.
        policy: as it was before the update, and still is.
        """
        self.row += 1
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")  # the schedule steps all the same
        rank = f".rank{distributed.rank()}" if distributed.rank() else ""
        path = self.folder / f"{position['updates']:06d}{rank}.ckpt"
        sharded = distributed.is_sharded(policy)  # each rank has a part of the weights, which nothing could repeat
        if not sharded and len(list(self.folder.glob("*.ckpt"))) < KEPT * distributed.world_size():
            weights = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
            saved = {**position, "tokens": minibatch.to("cpu"), "weights": weights}
            PlainCheckpoints().save_checkpoint(saved, path)
        update = f"update {position['updates']} (rollout {position['rollout']})"
        line = f"{update}: the gradient is not finite, so no step was made"
        look = "strategy=ddp writes such an update" if sharded else f"python train.py replay={path} shows where"
        if self.row >= self.most:
            advice = "lower optim.optimizer.lr or mend the loss, and resume"
            raise UserError(f"{line}, {self.row} times in a row; {look}; {advice}")
        log.warning("%s; %s", line, look)
