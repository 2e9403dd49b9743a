"""Report: writes RUN/report.html at the end of a run, however it ends."""

import logging
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.runs.manifest import ending, in_a_line
from grpo.runs.report import write_report
from grpo.system.ranges import Whole

log = logging.getLogger(__name__)


class Report(L.Callback):
    """Writes the report. It comes after Samples and Health, whose results it shows.

    folder: the run's folder. samples: the number of samples on the page at most.
    """

    def __init__(self, folder: str, samples: Whole = 2000) -> None:
        self.folder, self.samples = Path(folder), samples

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write(None)

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if not (
            isinstance(exception, SystemExit) and not exception.code
        ):  # preflight=only ends well, without a rollout
            self.write(exception)

    def write(self, error: BaseException | None) -> None:
        """Write the report. A failure is only logged: a page is no reason to lose a run. error: what ended the run, or None."""
        try:
            write_report(self.folder, samples=self.samples, ending=ending(error))
        except Exception as failure:
            log.warning(f"no report.html ({in_a_line(failure)}); later: python -m grpo.report {self.folder}")
