"""EvaluationCallback: evaluates the policy on held-out examples, before training and every few rollouts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L

from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.rollout.samples_table import on_disk
from grpo.system.errors import UserError
from grpo.system.states import everything
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.recorder import record
from grpo.training.callbacks.rollout import RolloutCallback


class EvaluationCallback(L.Callback):
    """Evaluates the policy, and sends all metrics to the loggers.

    It uses the engine, task and renderer of RolloutCallback while no rollout is being played. An evaluation that a signal or an
    error ends is made when the run is resumed. examples: held-out ones by the names of `Evaluator.sources`; others are ignored.
    """

    def __init__(self, rollout: RolloutCallback, evaluator: Evaluator, examples: Mapping[str, Sequence]) -> None:
        self.rollout, self.evaluator, self.examples = rollout, evaluator, examples
        self.accuracy: float | None = None  # the latest held-out accuracy
        self.first: list[Evaluation] = []  # the evaluation before the first rollout
        self.owed: dict[str, float] = {}  # the metrics of a rollout whose evaluation is not there yet
        self.latest: tuple[int, dict[str, float]] = 0, {}  # the latest rollout that was learned from, and its metrics
        self.at = -1  # the rollouts of the latest evaluation

    def progress(self) -> dict[str, float | str | None]:
        """Return the run's progress for the manifest; accuracy is the latest held-out accuracy. owed: whether the evaluation of
        the last policy is still to be made."""
        total, learned = self.rollout.plan.num_rollouts, self.rollout.learned
        return {
            **{"rollouts": learned, "num_rollouts": total, "accuracy": self.accuracy},
            **{"owed": bool(self.owed), "ended_by": self.rollout.ended_by},
        }

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        over = self.rollout.learned >= self.rollout.plan.num_rollouts
        if over and not self.owed:
            line = f"ckpt_path has learned from {self.rollout.learned} rollouts already"
            raise UserError(f"{line}: to continue, set a larger rollout.num_rollouts")
        if self.owed or (self.rollout.learned == 0 and self.evaluator.due(0, self.rollout.plan.num_rollouts)):
            self.first = [self.evaluate(saves=self.rollout.learned > 0)]
            record(trainer, self.owed | self.first[0].metrics, step=self.rollout.learned)
        if over:  # nothing is left to learn
            trainer.should_stop = True

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        batch.evaluations, self.first = batch.evaluations + self.first, []

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.latest = rollouts, _ = batch.rollout + 1, batch.metrics
        self.owed = {}
        try:
            if self.evaluator.due(rollouts, self.rollout.plan.num_rollouts):
                batch.evaluations.append(self.last(new=not trainer.should_stop))
                batch.metrics |= batch.evaluations[-1].metrics
        finally:
            batch.recorded = dict(batch.metrics)
            record(trainer, batch.recorded, rollouts)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Evaluate the last policy of a run that ends early, for the callbacks that come after this one."""
        rollouts, self.owed = self.latest[0], {}
        if self.rollout.begun and self.at != rollouts and self.evaluator.due(rollouts, rollouts):
            self.first = [self.last()]
            record(trainer, self.first[0].metrics, rollouts)

    def last(self, **stop: bool) -> Evaluation:
        """Evaluate the policy after the latest rollout. A resumed run makes up for it if this is ended, by whatever it is."""
        self.owed = self.latest[1]  # with what other callbacks add
        evaluation = self.evaluate(**stop)
        self.owed = {}
        return evaluation

    def state_dict(self) -> dict:
        return {"owed": self.owed} if self.owed else {}

    def load_state_dict(self, state: dict) -> None:
        self.owed = state["owed"]

    def evaluate(self, **stop: bool) -> Evaluation:
        """Evaluate the present policy. stop: see `Stop.allowed`."""
        rollout, rollouts = self.rollout, self.rollout.rollouts
        begun = time.perf_counter()
        failed = Path(rollouts.folder) / "evaluations" / f"{rollout.learned:06d}.failed.parquet"
        slots = rollouts.task, rollouts.engine, rollouts.renderer
        with rollout.stop.allowed("the same command with resume=auto makes the evaluation again", **stop):
            if rollout.ahead:
                rollout.ahead.settle()
            rollout.sync()
            rollout.before = rollout.before or everything(rollout.objects)
            with rollouts.while_sampling(), on_disk(failed):
                evaluation = self.evaluator(*slots, rollouts.seed, rollout.learned, self.examples)
        self.accuracy, rollout.before = evaluation.metrics["eval/accuracy"], None
        self.at = rollout.learned
        return replace(evaluation, seconds=time.perf_counter() - begun)
