"""Report: writes RUN/report.html at the end of a run, however it ends, and with report=live also as the run goes."""

import logging
import time
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.extras.report import write_report
from grpo.runs.manifest import ending, in_a_line
from grpo.system.ranges import Whole

log = logging.getLogger(__name__)

REFRESH = 5.0  # seconds between two versions of a live page, at least


class Report(L.Callback):
    """Writes the report. It comes after Samples and Health, whose results it shows.

    folder: the run's folder. samples: the number of samples on the page at most. when: live writes it after rollouts, too, and
    takes at most a twentieth of the run's time for it.
    """

    def __init__(self, folder: str, samples: Whole = 2000, when: Literal["end", "live"] = "end") -> None:
        self.folder, self.samples, self.when = Path(folder).resolve(), samples, when
        self.due = 0.0  # when to write the page again

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *batch: object) -> None:
        begun = time.monotonic()
        if self.when == "live" and begun >= self.due:
            if not self.due:
                log.info("the page of this run, which changes as it goes:\n%s", (self.folder / "report.html").as_uri())
            self.write(None, running=True)
            now = time.monotonic()
            self.due = now + max(REFRESH, 20 * (now - begun))

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.write(None)

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        ended_well = isinstance(exception, SystemExit) and not exception.code  # preflight=only, without a rollout
        if not ended_well:
            self.write(exception)

    def write(self, error: BaseException | None, running: bool = False) -> None:
        """Write the report. A failure is only logged: a page is no reason to lose a run. error: what ended the run, or None.
        running: whether it goes on."""
        state = {"live": REFRESH} if running else {"ending": ending(error)}
        try:
            write_report(self.folder, samples=self.samples, **state)
        except Exception as failure:
            log.warning(f"no report.html ({in_a_line(failure)}); later: python -m grpo.report {self.folder}")
