"""Report: RUN/report.html at the end of a run, however it ends."""

import logging
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.runs.manifest import ending, in_a_line
from grpo.runs.report import write_report

log = logging.getLogger(__name__)


class Report(L.Callback):
    """folder: of the run. samples: how many are in the page at most. Behind Samples and Health, which leave what it shows."""

    def __init__(self, folder: str, samples: int = 2000) -> None:
        self.folder, self.samples = Path(folder), samples

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write(None)

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.write(exception)

    def write(self, error: BaseException | None) -> None:
        """Logs a line where it fails: a page is no reason to lose a run."""
        try:
            write_report(self.folder, samples=self.samples, ending=ending(error))
        except Exception as failure:
            log.warning(f"no report.html ({in_a_line(failure)}); later: python -m grpo.report {self.folder}")
