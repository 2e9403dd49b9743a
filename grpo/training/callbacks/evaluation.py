"""EvaluationCallback: evaluates the policy on held-out examples, before training and every few rollouts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L

from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.rollout.samples_table import saving_failures
from grpo.system.seeds import everything
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.measure import record
from grpo.training.callbacks.rollout import RolloutCallback


class EvaluationCallback(L.Callback):
    """Evaluates the policy, and sends all metrics to the loggers.

    It uses the engine, task and renderer of RolloutCallback while no rollout is being played. An evaluation that is ended is
    made when the run is resumed. examples: held-out examples by the names of `Evaluator.sources`; others are ignored.
    """

    def __init__(self, rollout: RolloutCallback, evaluator: Evaluator, examples: Mapping[str, Sequence]) -> None:
        self.rollout, self.evaluator, self.examples = rollout, evaluator, examples
        self.accuracy: float | None = None  # the latest held-out accuracy
        self.first: list[Evaluation] = []  # the evaluation before the first rollout
        self.owed: dict[str, float] = {}  # the metrics of a rollout whose evaluation is not made

    def progress(self) -> dict[str, float | None]:
        """Return the run's progress for the manifest; accuracy is the latest held-out accuracy."""
        total, learned = self.rollout.plan.num_rollouts, self.rollout.learned
        return {"rollouts": learned, "num_rollouts": total, "accuracy": self.accuracy, "owed": bool(self.owed)}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        due = self.evaluator.due(learned := self.rollout.learned, self.rollout.plan.num_rollouts)
        if self.owed or (due and not learned):
            self.first = [self.evaluate(saves=learned > 0)] if due else []
            record(trainer, self.owed | (self.first[0].metrics if due else {}), step=learned)

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        batch.evaluations, self.first = batch.evaluations + self.first, []

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        rollouts, self.owed = batch.rollout + 1, {}
        try:
            if self.evaluator.due(rollouts, self.rollout.plan.num_rollouts):
                self.owed = batch.metrics  # until it is made; with what other callbacks add
                batch.evaluations.append(self.evaluate(new=not trainer.should_stop))
                batch.metrics |= batch.evaluations[-1].metrics
                self.owed = {}
        finally:
            batch.recorded = dict(batch.metrics)
            record(trainer, batch.recorded, rollouts)

    def state_dict(self) -> dict:
        return {"owed": self.owed, "accuracy": self.accuracy}

    def load_state_dict(self, state: dict) -> None:
        self.owed, self.accuracy = state["owed"], state.get("accuracy")

    def evaluate(self, **stop: bool) -> Evaluation:
        """Evaluate the present policy. stop: see `Stop.allowed`."""
        rollout, rollouts, begun = self.rollout, self.rollout.rollouts, time.perf_counter()
        failed = Path(rollouts.folder) / "evaluations" / f"{rollout.learned:06d}.failed.parquet"
        slots = rollouts.task, rollouts.engine, rollouts.renderer
        with rollout.stop.allowed("the same command with resume=auto makes the evaluation again", **stop):
            if rollout.ahead:
                rollout.ahead.settle()
            rollout.sync()
            rollout.before = rollout.before or everything(rollout.objects)  # a resumed run makes it again
            with rollouts.while_sampling(), saving_failures(failed):
                evaluation = self.evaluator(*slots, rollouts.seed, rollout.learned, self.examples)
        self.accuracy, rollout.before = evaluation.metrics["eval/accuracy"], None
        return replace(evaluation, seconds=time.perf_counter() - begun)
