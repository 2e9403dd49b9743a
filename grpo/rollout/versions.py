"""The age of the weights that sampled each token, in versions: the rollouts that weights have learned from."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo.objectives.batch import TokenBatch
from grpo.rollout.types import Group, Sample


def versions_of(group: Group, version: int) -> list[int]:
    """Return the version that sampled each token of a group, sample by sample, turn by turn; see `versions_of_turns`."""
    return [v for sample in group for turn in versions_of_turns(sample, version) for v in turn]


def versions_of_turns(sample: Sample, version: int) -> list[Sequence[int]]:
    """Return the version that sampled each token of each turn. version: the engine's when the rollout began, for engines that
    report none; a replayed sample is older by its age."""
    begun = max(0, version - sample.age)
    return [turn.completion.versions or (begun,) * len(turn.completion.ids) for turn in sample.turns]


def with_staleness(tokens: TokenBatch, groups: Sequence[Group], version: int, update: int) -> TokenBatch:
    """Add the staleness of each token, [B, C]: `update`, the version before the update, less that of the weights that sampled it.
    Where all are 0 it stays None. tokens: of `collate(groups)`; version: see `versions_of`."""
    versions = [v for group in groups for v in versions_of(group, version)]
    if all(v == update for v in versions):
        return tokens
    rows, columns = tokens.mask.nonzero(as_tuple=True)
    _, place = tokens.sample.unique_consecutive(return_inverse=True)
    turn = tokens.turn[rows, columns]
    order = (place[rows] * (turn.max() + 1) + turn).argsort(stable=True)  # a sample's turns may lie in several rows
    staleness = torch.zeros_like(tokens.rollout_logprobs)
    staleness[rows[order], columns[order]] = update - torch.tensor(versions, dtype=torch.float32)
    return replace(tokens, staleness=staleness)
