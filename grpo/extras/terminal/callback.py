"""Terminal: shows progress and completions, and at the end a table of evaluations and a summary."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo.env.messages import in_a_text
from grpo.evaluation.evaluator import Evaluation
from grpo.evaluation.intervals import Estimate
from grpo.extras.health.callback import Health
from grpo.extras.health.waiting import about_waits
from grpo.extras.terminal.evaluations import history, result_lines, sparkline
from grpo.extras.terminal.screen import Screen
from grpo.extras.terminal.summary import NEEDED, clock, in_short, panel, summary
from grpo.rollout.types import Sample
from grpo.system.calls import SPENT
from grpo.system.errors import plural
from grpo.system.files import LOST
from grpo.system.metrics import percent, require_metric, written
from grpo.system.output.console import SCREENS, Logged, console, to_logs
from grpo.system.output.users_code import from_here
from grpo.system.ranges import Count, Whole
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.trainer import callbacks_of

SPARKS = 40  # evaluations in the sparkline


def status(metrics: Mapping[str, float], left: float, columns: Sequence[str] = ()) -> str:
    """Return the line of a rollout, at most 66 characters. left: the remaining seconds. columns: more metrics, beyond that."""
    logged = [name for name in columns if name in metrics]
    more = "".join(f"{name.rpartition('/')[2]} {written(name, metrics[name])}  " for name in logged)
    signal = metrics.get("rollout/effective_groups")  # None in groups of one sample
    groups = "" if signal is None else f"groups {percent(signal, 0)}  "
    return (
        f"reward {metrics['rollout/reward']:.2f}  solved {percent(metrics['rollout/solve_rate'], 0)}  {groups}"
        f"{more}{metrics['tokens/s']:,.0f} tok/s  {clock(left)} left"
    )


def sample_panel(title: str, sample: Sample) -> Panel:
    """Return an episode for the terminal: the end of its prompt, then its messages; text that is not the policy's is dim."""
    if not (steps := sample.trajectory.steps):
        error = Text(sample.trajectory.error or "")
        return Panel(error, title=f"{title}: the environment did not start", title_align="left")
    prompt = in_a_text(steps[0].state.messages[-1].as_dict()["content"])
    text = Text(prompt if len(prompt) < 500 else "..." + prompt[-500:], style="dim")
    for message in sample.trajectory.messages[len(steps[0].state.messages) :]:
        calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
        words = "\n".join(filter(None, (in_a_text(message.as_dict()["content"])[:1000], *calls)))
        text.append("\n" + words, style="default" if message.role == "assistant" else "dim")
    return Panel(text, title=f"{title}: reward {sample.reward.value:.2f}, {sample.length} tokens", title_align="left")


def without_lines(shown: RenderableType) -> RenderableType:
    """Return a table or a panel without its lines, for output that is no terminal."""
    if isinstance(shown, Panel):
        return Group(shown.title, shown.renderable)
    shown.box = None
    return shown


LEFT = ("train.log", "metrics.csv", "rollouts", "evaluations", "checkpoints/best", "checkpoints/last.ckpt")


class Terminal(L.Callback):
    """Shows a run in the terminal: a line for each evaluation, and below the lines the newest rollout and a sparkline of held-out
    accuracy, which change in place. Output that is no terminal gets plain lines. The tables of all evaluations and times are in
    the log alone, and the summary is in both.

    folder: the run's folder. num_rollouts: length of the run. samples: completions shown at the start and at the end.
    samples_every: rollouts between further completions; 0: none in between. every: where nothing changes in place, rollouts
    between two lines; 0: none. columns: more metrics in the line of a rollout; one that the rollout lacks is left out.
    """

    def __init__(
        self,
        folder: str,
        num_rollouts: Count,
        samples: Whole = 1,
        samples_every: Whole = 0,
        every: Whole = 10,
        columns: Sequence[str] = (),
    ) -> None:
        for name in columns:
            require_metric("callbacks.terminal.columns", name)
        self.folder, self.num_rollouts = Path(folder), num_rollouts
        self.samples, self.samples_every, self.every, self.columns = samples, samples_every, every, columns
        self.console = console()
        self.learned: list[Mapping[str, float]] = []  # metrics of this process's rollouts
        self.evaluations: dict[int, Evaluation] = {}  # by rollouts learned from, without their samples
        self.screen: Screen | None = None  # during the run
        self.own: Screen | None = None  # that of a run from Python, which has none
        self.last: RolloutBatch | None = None
        self.begun = time.perf_counter()
        self.seconds, self.spent = 0.0, {}  # of the run that this one resumes

    def state_dict(self) -> dict:
        """Return what the summary tells about the run so far."""
        evaluations = [
            {
                "rollout": each.rollout,
                "seconds": each.seconds,
                "estimates": {k: [*v] for k, v in each.estimates.items()},
            }
            for each in self.evaluations.values()
        ]
        learned = [{name: row[name] for name in NEEDED if name in row} for row in self.learned]
        seconds = time.perf_counter() - self.begun
        return {"learned": learned, "evaluations": evaluations, "seconds": seconds, "spent": dict(SPENT)}

    def load_state_dict(self, state: dict) -> None:
        self.learned, self.seconds, self.spent = state["learned"], state["seconds"], state["spent"]
        for each in state["evaluations"]:
            estimates = {name: Estimate(*values) for name, values in each["estimates"].items()}
            self.evaluations[each["rollout"]] = Evaluation(each["rollout"], (), estimates, seconds=each["seconds"])

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock before on_train_start, in which the policy is evaluated, since that is part of the run's time."""
        self.begun = time.perf_counter() - self.seconds
        SPENT.clear()
        SPENT.update(self.spent)
        if not SCREENS:
            self.own = Screen().start()
        self.screen = SCREENS[-1]
        self.console = self.screen.console
        self.screen.doing("getting ready")

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print the evaluation before training, which EvaluationCallback has just made."""
        for evaluation in callbacks_of(trainer.callbacks, EvaluationCallback):
            self.note(evaluation.first)
        self.doing("playing the first rollout")

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print the evaluation of a run that has ended early."""
        self.on_train_start(trainer, module)
        self.doing("finishing")

    @rank_zero_only
    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        if self.last is None:
            self.show(batch)
        self.note(batch.evaluations)
        self.doing(f"learning from rollout {batch.rollout + 1}")

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        first, self.last = self.last is None, batch
        self.learned.append(batch.metrics)
        self.note(batch.evaluations)
        rollout = batch.rollout + 1
        per_rollout = (time.perf_counter() - self.begun) / len(self.learned)
        left = per_rollout * (self.num_rollouts - rollout)
        line = f"{rollout}/{self.num_rollouts}  {status(batch.metrics, left, self.columns)}"
        if self.screen:
            self.screen.status = self.in_place(line)
            self.screen.tick()
        due = self.every and (rollout % self.every == 0 or rollout == self.num_rollouts)
        if due:
            to_logs(f"rollout {line}") if self.screen and self.screen.bars else self.line(f"rollout {line}")
        between = not first and rollout < self.num_rollouts
        if between and self.samples_every and rollout % self.samples_every == 0:
            self.show(batch)
        self.doing(f"playing rollout {rollout + 1}" if rollout < self.num_rollouts else "finishing")

    def doing(self, words: str) -> None:
        """Name what the run is doing, for a bar if that takes long."""
        if self.screen:
            self.screen.doing(words)

    def note(self, evaluations: Sequence[Evaluation]) -> None:
        """Print the new ones among the evaluations, and keep their numbers."""
        for evaluation in evaluations:
            if evaluation.rollout not in self.evaluations:
                self.evaluations[evaluation.rollout] = replace(evaluation, groups=(), columns={})
                for line in result_lines(evaluation.rollout, evaluation.estimates):
                    self.line(line)

    def in_place(self, line: str) -> Text:
        """Return the line of a rollout and the sparkline, each cut at the width of the terminal."""
        shares = [evaluation.metrics["eval/accuracy"] for evaluation in self.evaluations.values()]
        held_out = f"\nheld out  {sparkline(shares[-SPARKS:])}  {percent(shares[-1])}" if shares else ""
        return Text(line + held_out, no_wrap=True, overflow="ellipsis")

    def line(self, text: str) -> None:
        """Print one line, without breaking it or reading it as markup."""
        self.console.print(Text(text), soft_wrap=True)

    def draw(self, shown: RenderableType) -> None:
        """Print a table or a panel."""
        self.console.print(shown if self.console.is_terminal else without_lines(shown))

    def show(self, batch: RolloutBatch) -> None:
        """Print completions of a rollout, one per group."""
        for group in batch.groups[: self.samples]:
            self.draw(sample_panel(f"rollout {batch.rollout + 1}", group[0]))

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.away()
        if self.last is not None:
            self.show(self.last)
        evaluations = list(self.evaluations.values())
        if evaluations:
            self.keep(history([(evaluation.rollout, evaluation.metrics) for evaluation in evaluations]))
        if self.learned:
            warned = [name for health in callbacks_of(trainer.callbacks, Health) for name in health.warned()]
            warned += ["not written: " + ", ".join(Path(name).name for name in LOST)] if LOST else []
            saving = callbacks_of(trainer.callbacks, Checkpoint)
            seconds, saved = time.perf_counter() - self.begun, sum(callback.seconds for callback in saving)
            lost = {rollouts for callback in saving for rollouts in callback.lost}
            found = summary(self.learned, evaluations, seconds, warned, saved, SPENT, lost)
            for chosen in (callback.chosen for callback in saving if callback.chosen):
                found["checkpoints/best"] = chosen
            table = Table("the run", "", show_header=False)
            for row in found.items():
                table.add_row(*row)
            self.keep(table)
            self.draw(panel(in_short(found), f"the run: {plural(len(self.learned), 'rollout')} in {clock(seconds)}"))
            for rollout in callbacks_of(trainer.callbacks, RolloutCallback):
                plan, apart = rollout.plan, getattr(rollout.engine, "apart", False)
                for line in about_waits(self.learned, plan.ahead, apart, plan.order):
                    self.line(line)
        left = [name for name in LEFT if (self.folder / name).exists()]
        self.line(f"written to {from_here(self.folder)}: {', '.join(left)}")
        if "checkpoints/best" in left:
            command = f"python eval.py {shlex.quote(f'run={from_here(self.folder)}')}"
            self.line(f"the best policy on all test examples: {command}")
        if (page := self.folder / "report.html").exists():
            self.line(page.resolve().as_uri())

    def keep(self, table: RenderableType) -> None:
        """Print a table to the log alone."""
        if isinstance(self.console, Logged):
            self.console.keep(table)

    def away(self) -> None:
        """Leave nothing that changes in place."""
        if self.screen:
            self.screen.status = None
            self.screen.tick()
        if self.own:
            self.own.stop()
        self.screen = self.own = None

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.away()
