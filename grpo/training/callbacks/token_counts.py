"""Tokens: counts the tokens of a whole run, also across its stops."""

from collections import Counter

import lightning as L

from grpo.training.batch import RolloutBatch


class Tokens(L.Callback):
    """Adds data/tokens and data/tokens_learned to the metrics of each rollout. It comes before EvaluationCallback, which logs."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # since the run began

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        learned = float(batch.scores.lengths.sum())
        self.counts.update({"data/tokens": batch.metrics["rollout/tokens"], "data/tokens_learned": learned})
        batch.metrics |= self.counts

    def state_dict(self) -> dict[str, float]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.counts = Counter(state)
