"""Trackers for TensorBoard, Weights & Biases, MLflow and trackio. They show a run while it is going and are optional.

They use the clients directly, because Lightning's loggers would break promises of docs/logging.md: its MLFlowLogger writes
eval/pass@8 and eval/pass^8 under one name and cuts parameters at 250 characters, its WandbLogger uses another x-axis and does not
finish runs, and its TensorBoardLogger shows the settings only together with a metric that was never measured.
"""

import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from grpo.rollout.samples_table import conversation_of
from grpo.runs.run import Run
from grpo.system.output.secrets import hidden
from grpo.system.ranges import Seconds, flat

log = logging.getLogger(__name__)

LOCAL = "sqlite:///outputs/mlflow.db"
Row = Mapping[str, Any]  # a sample, as in a table of samples, and its advantage in a rollout
SHOWN = ("prompt", "completion", "reward", "advantage", "tokens")  # where a sample is a row or a text


class Tracker(Logger):
    """A logger that cannot stop a run: after its first error it logs one warning and does nothing more.

    folder: the folder of the run.
    group, name: names of the sweep and of the run in the tracker; by default the names of their folders.
    options: further arguments of the client.

    A subclass defines `start` (called with the configuration by dotted key), `metrics`, `samples` and `end`. All four may raise.
    """

    name = version = ""  # Lightning needs them
    advice = ""  # added to the warning if the tracker did not start

    def __init__(self, folder: str, group: str | None = None, name: str | None = None, **options: Any) -> None:
        self.folder = Path(folder)
        name = name or "/".join(self.folder.absolute().parts[-2:])
        self.options = {"group": group or sweep(self.folder), "name": name, **options}
        self.works: bool | None = None  # None before the start, and on every rank except the first

    @property
    def experiment(self) -> None:
        """Start the tracker. Lightning reads this property when a run begins."""
        if rank_zero_only.rank == 0 and self.works is None:
            self.works = True
            self.attempt("did not start", self.start, flat(Run(self.folder).config), advice=f" ({self.advice})")

    def log_hyperparams(self, params: Any) -> None:
        """Do nothing: `start` gets the configuration."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send metrics. step: the number of rollouts learned from."""
        self.attempt("failed", self.metrics, metrics, step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Send samples as a table or text under a name. step: the number of rollouts learned from."""
        if rows:
            self.attempt("failed", self.samples, name, rows, step)

    def finalize(self, status: str) -> None:
        """End the tracker's run; status is "success" if training was not stopped by an exception."""
        self.attempt("failed at the end", self.end, status == "success")
        self.works = False

    def attempt(self, what: str, call: Callable[..., None], *arguments: Any, advice: str = "") -> None:
        """Call the client if the tracker still works. After an exception log one warning and stop using it."""
        if not self.works:
            return
        try:
            call(*arguments)
        except Exception as error:  # a client may raise any type
            self.works = False
            text = re.sub(
                r"//[^/@\s]+@", "//***@", hidden(str(error))
            )  # also a short name: addresses of trackers have keys
            reason = (text.strip().splitlines() or [type(error).__name__])[0][:200]
            log.warning(f"{type(self).__name__} {what}, the run continues without it: {reason}{advice}")


class TensorBoard(Tracker):
    """Writes event files to RUN/tensorboard."""

    advice = "pip install tensorboard"

    def start(self, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter, summary

        shown = {name: value if isinstance(value, (int, float)) else str(value) for name, value in settings.items()}
        # the metrics logged later fill these columns
        self.settings = summary.hparams(shown, {"eval/accuracy": 0.0, "rollout/reward": 0.0})
        self.make, self.writer = SummaryWriter, None

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self.writer is None:  # in a resumed run, hide the events from this step on of the earlier process
            self.writer = self.make(str(self.folder / "tensorboard"), purge_step=step)
            for summary in self.settings:
                self.writer.file_writer.add_summary(summary)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        self.writer.add_text(name, markdown(rows), step)

    def end(self, well: bool) -> None:
        if self.writer is not None:
            self.writer.close()


class Wandb(Tracker):
    """Sends a run to Weights & Biases.

    timeout: seconds for the server to answer at the start, and to accept the remaining data at the end.
    options: arguments of wandb.init, such as mode: online, offline (files in the run's folder, for `wandb sync`) or disabled.
    """

    advice = "pip install wandb and wandb login, or logger.wandb.mode=offline"

    def __init__(self, folder: str, timeout: Seconds = 20.0, **options: Any) -> None:
        super().__init__(folder, **options)
        self.timeout = timeout

    def start(self, settings: Mapping[str, Any]) -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if self.options.get("mode", "online") == "online" and not wandb.login(prompt=False, verify=False):
            raise ConnectionError("not logged in")
        limits = {"init_timeout": self.timeout, "finish_timeout": self.timeout, "finish_timeout_raises": True}
        self.run = wandb.init(
            dir=self.folder,
            config=dict(settings),
            reinit="create_new",  # the jobs of a sweep may share a process
            settings=wandb.Settings(console="off", **limits),
            **self.options,
        )
        self.run.define_metric("*", step_metric="rollouts")
        if self.run.url:
            log.info(f"Wandb: {self.run.url}")

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log({"rollouts": step, **metrics})

    def samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        import wandb

        names = [name for name in SHOWN if name in rows[0]]
        table = wandb.Table(columns=names, data=[[row[name] for name in names] for row in rows])
        self.run.log({"rollouts": step, name: table})

    def end(self, well: bool) -> None:
        self.run.finish(exit_code=0 if well else 1)


class MLflow(Tracker):
    """Sends a run to MLflow.

    uri: address of a server, or sqlite:///FILE with the artifacts beside the file. None takes the environment's
        MLFLOW_TRACKING_URI, which may hold a password and is saved nowhere, or else LOCAL.
    experiment: name of the experiment.
    """

    advice = "pip install mlflow, and check that the server of logger.mlflow.uri runs"

    def __init__(self, folder: str, uri: str | None = None, experiment: str = "grpo", **options: Any) -> None:
        super().__init__(folder, **options)
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or LOCAL
        self.experiment_name = experiment
        self.tags = {"group": group} if (group := self.options["group"]) else {}

    def start(self, settings: Mapping[str, Any]) -> None:
        # so that an unreachable server delays a run by seconds, not by minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for library in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(library).setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        artifacts = None
        if self.uri.startswith("sqlite:///"):
            artifacts = str(Path(self.uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts")
            Path(artifacts).parent.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(self.uri)
        if experiment := self.client.get_experiment_by_name(self.experiment_name):
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(self.experiment_name, artifacts)
        run = self.client.create_run(experiment_id, run_name=self.options["name"], tags=self.tags)
        self.run_id = run.info.run_id
        params = [Param(allowed(name), str(value)[:6000]) for name, value in settings.items()]
        self.client.log_batch(self.run_id, params=params)

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        logged = [Metric(allowed(name), value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=logged)

    def samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        self.client.log_text(self.run_id, markdown(rows), f"{name}/{step:06d}.md")

    def end(self, well: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if well else "FAILED")


class Trackio(Tracker):
    """Writes a run to trackio: a database in TRACKIO_DIR, or a Space of the hub. options: arguments of trackio.init."""

    advice = "pip install trackio"

    def start(self, settings: Mapping[str, Any]) -> None:
        import trackio

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(io.StringIO()):
            self.run = trackio.init(config=dict(settings), **quiet, **self.options)

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step)

    def samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        from trackio import Trace

        traces = [Trace(conversation_of(row), {key: row.get(key) for key in SHOWN[2:]}) for row in rows]
        self.run.log({name: traces}, step)

    def end(self, well: bool) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # of the run that began last; it would else end at the exit of the program, with a message


def sweep(folder: Path) -> str | None:
    """Return the name of the sweep that a run's folder belongs to; None for a single run."""
    parent = folder.absolute().parent
    return parent.name if (parent / "multirun.yaml").is_file() else None


def allowed(name: str) -> str:
    """Return a metric's name in MLflow's alphabet: eval/pass@8 becomes eval/pass_at_8, eval/pass^8 becomes eval/pass_hat_8."""
    return re.sub(r"[^\w/. :-]", "_", name.replace("@", "_at_").replace("^", "_hat_"), flags=re.ASCII)


def markdown(rows: Sequence[Row]) -> str:
    """Return samples as Markdown: for each its numbers, then its texts, indented so that they are shown literally."""
    parts = []
    for row in rows:
        shown = {name: row[name] for name in SHOWN if row.get(name) is not None}
        texts = {name: value for name, value in shown.items() if isinstance(value, str)}
        parts.append(", ".join(f"**{name}** {value:.4g}" for name, value in shown.items() if name not in texts))
        for name, text in texts.items():
            parts += [f"*{name}*", "\n".join(f"    {line}" for line in text.splitlines() or [""])]
    return "\n\n".join(parts)
