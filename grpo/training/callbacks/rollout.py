"""RolloutCallback: plays a rollout before each update and turns it into tensors; completes its metrics after the update."""

import time
from functools import partial

import lightning as L

from grpo.rollout.collate import collate
from grpo.rollout.lookahead import MIXED, Ahead
from grpo.rollout.rollout_metrics import group_counts, rollout_metrics
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.versions import with_staleness
from grpo.system import distributed, memory
from grpo.system.errors import StopError, UserError
from grpo.system.progress import Progress
from grpo.system.seeds import everything, set_everything, states_of
from grpo.system.stopping.stop import Stop
from grpo.training.batch import RolloutBatch, RolloutBatches


class RolloutCallback(L.Callback):
    """Plays the rollouts, and counts them: the count is the x-axis of all metrics; 0 is the policy before training.

    The count determines all prompts and seeds, so a resumed run equals an uninterrupted one. The states of random generators and
    of the user's objects are saved with it. stop: whether the run should end, before a rollout or in the middle of one, which a
    resumed run plays again. ahead: plays rollouts during the update; None: nobody does.
    """

    def __init__(self, rollouts: Rollouts, stop: Stop | None = None, ahead: Ahead | None = None) -> None:
        self.stop = stop or Stop()
        self.rollouts, self.plan, self.engine = rollouts, rollouts.plan, rollouts.engine
        self.objects, self.ahead = rollouts.objects, ahead
        self.learned = 0  # rollouts learned from so far
        self.before: dict | None = None  # the states before the rollout that is being played or learned from
        self.learning: dict = {}  # with rollouts ahead: the states that the update changes, before it
        self.batches, self.policy = RolloutBatches(), None
        self.rounding: float | None = None  # the difference of log-probabilities that rounding explains, in nats
        self.syncing = self.started = 0.0

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Called before the policy moves to its device. An engine that shares the policy's memory gets the policy now, so that
        there is never a second copy; other engines get it later, since a checkpoint may still be loaded into it."""
        self.policy, self.rollouts.while_sampling = module.policy, trainer.precision_plugin.forward_context
        if not getattr(self.engine, "apart", False):
            self.sync()
            if own := getattr(trainer.strategy, "while_sampling", None):
                self.rollouts.while_sampling = partial(own, module.policy)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.stop.listen(getattr(trainer.strategy, "ranks", None))  # after Lightning, which takes SIGTERM itself
        if check := getattr(trainer.strategy, "check_ranks", None):
            check(trainer.world_size, self.plan.prompts, self.learned)
        if self.ahead:
            self.ahead.begin(self.policy)

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        self.stop.check()
        batch.progress = Progress(batch.rollout, self.plan.num_rollouts)
        memory.reset_peak(module.device)
        self.started, self.syncing = time.perf_counter(), 0.0
        if self.ahead:
            rollout = self.ahead.make(batch.rollout, self.sync)
            self.learning = states_of({"advantage": self.objects["advantage"]})
        else:
            with self.stop.allowed():
                self.sync()
                self.before = everything(self.objects)
                rollout = self.rollouts.make(batch.rollout)
        if not self.ahead or not self.ahead.flying:
            getattr(self.engine, "sleep", lambda: None)()
        batch.groups, batch.discarded, batch.scores = rollout.groups, rollout.discarded, rollout.scores
        batch.version = rollout.version
        # by tokens, not by groups: the ranks wait for each other, and answers differ tenfold in length
        mine = distributed.balanced([sum(sample.length for sample in group) for group in batch.groups])
        groups, size = [batch.groups[i] for i in mine], batch.scores.rewards.shape[1]
        tokens = with_staleness(collate(groups, [i * size for i in mine]), groups, rollout.version, self.learned)
        batch.tokens = tokens.to(module.device)
        batch.metrics |= rollout_metrics(rollout.played, rollout.all_scores)
        batch.metrics |= {
            **group_counts(rollout.groups, rollout.played, rollout.rounds),
            **self.rollouts.sampler.progress(batch.rollout + 1),
            "time/sync": self.syncing,
            "time/rollout": time.perf_counter() - self.started - self.syncing,
            "memory/rollout": float(memory.peak(module.device)),
        }
        if self.ahead:
            batch.metrics |= self.ahead.facts(rollout, self.learned)
        memory.reset_peak(module.device)

    def on_train_batch_end(self, trainer, module, outputs: dict, batch: RolloutBatch, batch_idx: int) -> None:
        self.learned, self.before, self.learning = batch.rollout + 1, None, {}
        trainer.should_stop |= self.learned == self.plan.num_rollouts
        try:
            if self.ahead:
                self.ahead.learned(self.learned, self.policy, self.sync)
        finally:
            elapsed = time.perf_counter() - self.started
            batch.metrics |= outputs | {
                "memory/update": float(memory.peak(module.device)),
                "time/sync": self.syncing,
                "time/update": elapsed - self.syncing - batch.metrics["time/rollout"],
                "tokens/s": batch.metrics["rollout/tokens"] / elapsed,
            }

    def sync(self) -> None:
        """Give the engine the policy's weights, unless it already has them; their version is the number of rollouts."""
        begun = time.perf_counter()
        if self.engine.version != self.learned:
            self.engine.load_weights(self.policy, self.learned)
        self.syncing += time.perf_counter() - begun

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if self.ahead:
            self.ahead.stop(keeps=isinstance(exception, StopError))

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.ahead:  # in case another callback ended the run
            self.ahead.stop()
        for each in (*getattr(module, "parts", {}).values(), self.rollouts.sampler, self.engine):
            getattr(each, "close", lambda: None)()

    def state_dict(self) -> dict:
        ahead = self.ahead.state_dict() if self.ahead else {}  # first, since it may draw random numbers
        state = (self.before or everything(self.objects)) | ahead | {"seed": self.rollouts.seed}
        return {"rollouts": self.learned, **state, "objects": state["objects"] | self.learning}

    def load_state_dict(self, state: dict) -> None:
        self.learned = self.batches.start = state["rollouts"]
        set_everything(self.objects, state, same_seed=state.get("seed", self.rollouts.seed) == self.rollouts.seed)
        if "flying" in state.get("ahead", {}) and not (self.ahead and self.ahead.mixes):
            raise UserError(MIXED)
        if self.ahead:
            self.ahead.load_state_dict(state, self.learned)
