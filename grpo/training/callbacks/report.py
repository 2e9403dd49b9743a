"""Report: RUN/report.html at the end of a run, however it ends."""

import logging
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.runs.manifest import now
from grpo.runs.report import write_report

log = logging.getLogger(__name__)


class Report(L.Callback):
    """folder: of the run. samples: how many are in the page at most. Behind Samples and Health, which leave what it shows."""

    def __init__(self, folder: str, samples: int = 2000) -> None:
        self.folder, self.samples = Path(folder), samples

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write("finished")

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            self.write("interrupted")
        else:
            self.write("failed", " ".join(f"{type(exception).__name__}: {exception}".split()))

    def write(self, status: str, error: str | None = None) -> None:
        """Says so in a line where it fails: a page is no reason to lose a run."""
        try:
            write_report(self.folder, samples=self.samples, ending={"status": status, "error": error, "ended": now()})
        except Exception as failure:
            told = " ".join(f"{type(failure).__name__}: {failure}".split())
            log.warning(f"no report.html ({told}); later: python -m grpo.report {self.folder}")
