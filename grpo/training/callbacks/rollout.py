"""RolloutCallback: from prompts to a TokenBatch before each update, evaluation and metrics after it."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import torch

from grpo.data.prompts import PromptLoader
from grpo.engines.protocol import Engine
from grpo.env.renderer import Renderer
from grpo.env.types import Example, Task
from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.objectives.advantage import has_signal
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import Scores
from grpo.rollout.ahead import Ahead, Played
from grpo.rollout.collate import collate, scores
from grpo.rollout.episodes import play
from grpo.rollout.metrics import rollout_metrics
from grpo.rollout.samples_table import on_disk
from grpo.rollout.types import Group, Plan
from grpo.system import distributed, memory
from grpo.system.errors import RewardError, RolloutError, UserError
from grpo.system.seeds import TRAIN, derive_seed
from grpo.training.batch import RolloutBatch, RolloutBatches


class RolloutCallback(L.Callback):
    """One Lightning batch is one rollout.

    Owns the count of rollouts, the x-axis of everything: 0 is the policy before training. With it, the loader's place and
    all seeds are known; the random state that other code may use is saved beside it. held_out: the examples to evaluate on;
    folder: of the run, where a rollout goes whose reward failed. With plan.ahead the next rollout is played beside the update;
    evaluations and checkpoints wait for it.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        loader: PromptLoader,
        engine: Engine,
        renderer: Renderer,
        algorithm: Algorithm,
        evaluator: Evaluator,
        held_out: Sequence[Example],
        folder: str,
        seed: int,
    ) -> None:
        self.held_out, self.folder = held_out, Path(folder)
        self.plan, self.task, self.loader, self.engine, self.renderer = plan, task, loader, engine, renderer
        self.algorithm, self.evaluator, self.seed = algorithm, evaluator, seed
        self.rollouts = 0  # learned from so far
        self.batches = RolloutBatches()
        self.started = 0.0
        self.accuracy: float | None = None  # held out, the latest
        self.ahead: Ahead | None = None  # the rollout after the one that is learned from
        if plan.ahead and not getattr(engine, "apart", False):
            raise UserError(
                "rollout.ahead=1 needs an engine with weights of its own, engine=vllm or engine=vllm_server: the built-in one "
                "and vllm_shared sample from the very weights that the update changes"
            )

    # -- the way of a batch

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Before the policy moves to its device: an engine that shares its memory gives it that here, so that there is never a
        second copy. Others wait: a checkpoint may yet be read into the policy."""
        if not getattr(self.engine, "apart", False):
            self.engine.load_weights(module.policy, self.rollouts)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if distributed.world_size() != trainer.world_size:  # vLLM in the trainer's process makes a group of its own
            raise UserError(
                f"trainer.devices={trainer.world_size} does not go with this engine: set engine=transformers"
            )
        # `play` ends with messages between ranks, which would meet those of the update
        if self.plan.ahead and distributed.world_size() > 1:
            raise UserError(
                f"rollout.ahead=1 goes with one device only, not with trainer.devices={trainer.world_size}: set rollout.ahead=0"
            )
        if self.plan.prompts < distributed.world_size():
            raise UserError(
                f"rollout.prompts={self.plan.prompts} is fewer than the {trainer.world_size} devices: every one needs a prompt"
            )
        if self.rollouts >= self.plan.num_rollouts:
            raise UserError(
                f"ckpt_path has learned from {self.rollouts} rollouts already: set rollout.num_rollouts above that to go on"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch.rollout == 0 and self.evaluator.on_start and self.evaluator.every:
            batch.evaluations.append(self.evaluate(trainer, module))
            self.record(trainer, batch.evaluations[-1].metrics)
        memory.reset_peak(module.device)
        self.started = time.perf_counter()
        played, syncing = self.played(trainer, module, batch)
        groups, scored = played.groups, played.scores
        order = (~has_signal(scored.rewards)).int().argsort(stable=True)  # those with a signal first
        kept = sorted(order[: self.plan.prompts].tolist())
        batch.groups, batch.scores = [groups[i] for i in kept], scored.rows(kept)
        batch.examples = [group[0].example for group in batch.groups]
        mine = distributed.share(len(kept))
        batch.tokens = collate(batch.groups[mine.start : mine.stop], mine.start * self.plan.group_size).to(
            module.device
        )
        batch.metrics |= rollout_metrics(groups, scored) | {
            "rollout/rounds": float(played.rounds),
            "rollout/discarded_groups": float(len(groups) - len(kept)),
            "data/prompts": float((batch.rollout + 1) * self.loader.size),  # of the loader, those left out included
            "data/epoch": (batch.rollout + 1) * self.loader.size / len(self.loader.examples),
        }
        if self.plan.ahead:
            batch.metrics |= {"rollout/staleness": played.staleness(self.rollouts), "time/played": played.seconds}
        batch.metrics |= {"time/sync": syncing, "time/rollout": time.perf_counter() - self.started - syncing}
        batch.metrics["memory/rollout"] = float(memory.peak(module.device))
        memory.reset_peak(module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self.rollouts = batch.rollout + 1
        batch.metrics |= outputs
        if self.ahead and getattr(self.engine, "in_flight", False):
            batch.metrics["time/sync"] += self.sync(module)
        elapsed = time.perf_counter() - self.started
        batch.metrics["memory/update"] = float(memory.peak(module.device))
        batch.metrics["time/update"] = elapsed - batch.metrics["time/sync"] - batch.metrics["time/rollout"]
        batch.metrics["tokens/s"] = batch.metrics["rollout/tokens"] / elapsed
        last = self.rollouts == self.plan.num_rollouts
        if self.evaluator.every and (last or self.rollouts % self.evaluator.every == 0):
            batch.evaluations.append(self.evaluate(trainer, module))
            batch.metrics |= batch.evaluations[-1].metrics
        self.record(trainer, batch.metrics)
        trainer.should_stop = last

    def played(self, trainer: L.Trainer, module: L.LightningModule, batch: RolloutBatch) -> tuple[Played, float]:
        """The rollout to learn from, and the seconds that new weights took. With plan.ahead the next one begins here."""
        syncing = 0.0 if self.ahead else self.sync(module)
        played = self.ahead.result() if self.ahead else self.play(trainer, batch.rollout)
        self.ahead = None  # not before: who interrupts the wait must find the thread
        if self.plan.ahead and batch.rollout + 1 < self.plan.num_rollouts:
            syncing += self.sync(module)
            self.ahead = Ahead(partial(self.play, trainer, batch.rollout + 1))
        elif sleep := getattr(self.engine, "sleep", None):
            sleep()
        return played, syncing

    def play(self, trainer: L.Trainer, rollout: int) -> Played:
        begun, version = time.perf_counter(), self.engine.version
        failed = self.folder / "rollouts" / f"{rollout + 1:06d}.failed.parquet"
        with trainer.precision_plugin.forward_context(), on_disk(failed):  # autocast is a thread's own
            groups, scored, rounds = self.groups(rollout)
        return Played(groups, scored, rounds, version, time.perf_counter() - begun)

    def groups(self, rollout: int) -> tuple[list[Group], Scores, int]:
        """All groups that were sampled, what they earned, and in how many rounds: one, unless those without a signal are to be
        replaced."""
        groups, examples, rounds = [], self.loader.batch(rollout), 0
        while examples and rounds < self.algorithm.sampling_rounds:
            first = len(groups)
            try:
                groups += play(
                    self.task,
                    examples,
                    self.plan.group_size,
                    self.engine,
                    self.renderer,
                    self.plan.sampling,
                    lambda p, *path, first=first: derive_seed(self.seed, TRAIN, rollout, first + p, *path),
                    self.plan.limits,
                )
            except RolloutError as error:
                if isinstance(error, RewardError) or not groups:
                    raise
                groups += error.groups  # all environments of a later round, which may be one or two, failed
            rounds += 1
            scored = self.algorithm.shaped(scores(groups))
            live = int(has_signal(scored.rewards).sum())
            missing = self.plan.prompts - live
            if missing <= 0:
                break
            wanted = math.ceil(missing * len(groups) / max(live, 1))  # some will be of no use again
            wanted = min(wanted, self.plan.prompts)
            examples = self.loader.more(rollout, wanted, skip=len(groups) - self.plan.prompts)
        return groups, scored, rounds

    def sync(self, module: L.LightningModule) -> float:
        """Give the engine the policy's weights, unless it holds these very ones. A version counts rollouts learned from.
        Returns the seconds it took."""
        begun = time.perf_counter()
        if self.engine.version != self.rollouts:
            self.engine.load_weights(module.policy, self.rollouts)
        return time.perf_counter() - begun

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> Evaluation:
        if self.ahead:
            self.ahead.wait()
        begun = time.perf_counter()
        self.sync(module)
        failed = self.folder / "evaluations" / f"{self.rollouts:06d}.failed.parquet"
        with trainer.precision_plugin.forward_context(), on_disk(failed):
            evaluation = self.evaluator(self.task, self.engine, self.renderer, self.seed, self.rollouts, self.held_out)
        self.accuracy = evaluation.metrics["eval/accuracy"]
        return replace(evaluation, seconds=time.perf_counter() - begun)

    def progress(self) -> dict[str, float | None]:
        """accuracy: the latest on the held-out examples."""
        return {"rollouts": self.rollouts, "num_rollouts": self.plan.num_rollouts, "accuracy": self.accuracy}

    def record(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self.rollouts)
        # where monitors (early stopping, a sweep's objective) look for the latest values
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if self.ahead:
            self.ahead.stop()

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.ahead:  # where another callback ended the run
            self.ahead.stop()
        self.engine.close()

    # -- resuming

    def state_dict(self) -> dict:
        played = self.ahead.wait() if self.ahead else None  # first: it may draw random numbers
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        random_state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        state = {"rollouts": self.rollouts, "random": random_state | {"cuda": cuda}}
        return state | ({"ahead": (self.plan, played)} if played else {})

    def load_state_dict(self, state: dict) -> None:
        self.rollouts = self.batches.start = state["rollouts"]
        random.setstate(state["random"]["python"])
        np.random.set_state(state["random"]["numpy"])
        torch.set_rng_state(state["random"]["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random"]["cuda"])
        if "ahead" in state:
            plan, played = state["ahead"]
            if replace(plan, num_rollouts=self.plan.num_rollouts) == self.plan:  # else it is played anew
                self.ahead = Ahead(lambda: played)
