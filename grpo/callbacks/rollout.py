"""Layer 3 - RolloutCallback: from prompts to a TokenBatch before each update, evaluation and metrics after it."""

import random
import time
from collections.abc import Callable

import lightning as L
import numpy as np
import torch
from torch import Tensor

from grpo.collate import collate
from grpo.data import PromptBatch, PromptLoader
from grpo.engine import Engine
from grpo.errors import UserError
from grpo.evaluation import Evaluation, Evaluator
from grpo.renderer import Renderer
from grpo.rl import Task
from grpo.rollout import TRAIN, Plan, derive_seed, play, sample_means


class RolloutCallback(L.Callback):
    """One Lightning batch is one rollout.

    Owns the count of rollouts, the x-axis of everything: 0 is the policy before training. With it, the loader's place and
    all seeds are known; the random state that other code may use is saved beside it.
    """

    def __init__(
        self,
        plan: Plan,
        task: Task,
        loader: PromptLoader,
        engine: Engine,
        renderer: Renderer,
        advantage: Callable[[Tensor], Tensor],
        evaluator: Evaluator,
        seed: int,
    ) -> None:
        self.plan, self.task, self.loader, self.engine, self.renderer = plan, task, loader, engine, renderer
        self.advantage, self.evaluator, self.seed = advantage, evaluator, seed
        self.rollouts = 0  # learned from so far
        self.started = 0.0

    # -- the way of a batch

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.rollouts >= self.plan.num_rollouts:
            raise UserError(
                f"ckpt_path has learned from {self.rollouts} rollouts already: set rollout.num_rollouts above that to go on"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        if batch.rollout == 0 and self.evaluator.on_start and self.evaluator.every:
            batch.evaluations.append(self.evaluate(trainer, module))
            self.record(trainer, batch.evaluations[-1].metrics)
        self.started = time.perf_counter()
        self.sync(module)
        synced = time.perf_counter()
        with trainer.precision_plugin.forward_context():
            batch.groups = play(
                self.task,
                batch.examples,
                self.plan.group_size,
                self.engine,
                self.renderer,
                self.plan.sampling,
                lambda *path: derive_seed(self.seed, TRAIN, batch.rollout, *path),
            )
        rewards = torch.tensor([[sample.reward.value for sample in group] for group in batch.groups])  # [N, G]
        advantages = self.advantage(rewards)
        batch.advantages = advantages.tolist()
        batch.tokens = collate(batch.groups, advantages).to(module.device)
        batch.metrics |= rollout_metrics(batch, rewards)
        batch.metrics |= {"time/sync": synced - self.started, "time/rollout": time.perf_counter() - synced}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: PromptBatch, batch_idx: int
    ) -> None:
        elapsed = time.perf_counter() - self.started
        batch.metrics |= outputs
        batch.metrics["time/update"] = elapsed - batch.metrics["time/sync"] - batch.metrics["time/rollout"]
        batch.metrics["tokens/s"] = sum(sample.length for group in batch.groups for sample in group) / elapsed
        self.rollouts = batch.rollout + 1
        last = self.rollouts == self.plan.num_rollouts
        if self.evaluator.every and (last or self.rollouts % self.evaluator.every == 0):
            batch.evaluations.append(self.evaluate(trainer, module))
            batch.metrics |= batch.evaluations[-1].metrics
        self.record(trainer, batch.metrics)
        trainer.should_stop = last

    def sync(self, module: L.LightningModule) -> None:
        """Give the engine the policy's weights, unless it holds these very ones. A version counts rollouts learned from."""
        if self.engine.version != self.rollouts:
            self.engine.load_weights(module.policy, self.rollouts)

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule) -> Evaluation:
        self.sync(module)
        with trainer.precision_plugin.forward_context():
            return self.evaluator(self.task, self.engine, self.renderer, self.seed, self.rollouts)

    def record(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self.rollouts)
        # where monitors (early stopping, a sweep's objective) look for the latest values
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.engine.close()

    # -- resuming

    def state_dict(self) -> dict:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        random_state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        return {"rollouts": self.rollouts, "random": random_state | {"cuda": cuda}}

    def load_state_dict(self, state: dict) -> None:
        self.rollouts = self.loader.start = state["rollouts"]
        random.setstate(state["random"]["python"])
        np.random.set_state(state["random"]["numpy"])
        torch.set_rng_state(state["random"]["torch"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random"]["cuda"])


def rollout_metrics(batch: PromptBatch, rewards: Tensor) -> dict[str, float]:
    """What can be said of a rollout before anything is learned from it. rewards: [N, G]."""
    samples = [sample for group in batch.groups for sample in group]
    uneven = [any(advantage == advantage and advantage != 0 for advantage in row) for row in batch.advantages]
    return {
        "rollout/reward": float(rewards.nanmean()),
        "rollout/reward_std": float(np.nanstd(rewards.numpy())),
        "rollout/solve_rate": float(np.mean([sample.reward.correct for sample in samples])),
        "rollout/effective_groups": float(np.mean(uneven)),  # the share of groups that have something to teach
        **{f"rollout/{name}": mean for name, mean in sample_means(samples).items()},
    }
