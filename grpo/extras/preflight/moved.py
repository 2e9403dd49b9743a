"""Whether new weights reach the engine: noise is added to some, and taken away."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.preflight.checked import mean_gap
from grpo.objectives.batch import TokenBatch
from grpo.system.distributed import full, part_of
from grpo.system.errors import plural
from grpo.system.loading import kind_of


def moved(probe: Any, chosen: Mapping[str, Tensor], rows: TokenBatch, version: int) -> tuple[str, str]:
    """Return PASS, FAIL or SKIP and the numbers, with noise of a size that rounding does not hide, if there is one.

    chosen: a parameter of each kind. rows: their prompts are asked. version: of the moved weights; the next one may be used too.
    """
    small = moved_by(probe, chosen, rows, 0.3, version)
    return small if small[0] != "SKIP" else moved_by(probe, chosen, rows, 3.0, version + 1)


@torch.no_grad()
def moved_by(probe: Any, chosen: Mapping[str, Tensor], rows: TokenBatch, share: float, version: int) -> tuple[str, str]:
    """Add noise to parameters, compare, take it away, compare again. share: size of the noise, as a share of the parameter's."""
    bound, prompts = probe.bound, [ids for ids, _ in rows.sequences()]
    length, rng = probe.length_in(probe.allowance.left(1 / 8)), torch.Generator().manual_seed(0)
    with probe.kept([*chosen.values()]):
        for p in chosen.values():
            size = full(p).float().square().mean().sqrt().item() or 0.1
            p.add_(part_of(share * size * torch.randn(p.shape, generator=rng).to(p.device, p.dtype), p))
        probe.load(version)
        noisy = probe.sample(prompts, length)
        new = probe.trainer(noisy)[0]
    old = probe.trainer(noisy)[0]
    again = probe.sample(prompts, length)
    shift, gap = mean_gap(old, new, noisy), mean_gap(noisy.rollout_logprobs, new, noisy)
    restored = mean_gap(again.rollout_logprobs, probe.trainer(again)[0], again)
    text = f"{plural(len(chosen), 'kind')} of weights moved by {shift:.1e} nats: gap {gap:.1e}, restored {restored:.1e}"
    if shift < 8 * bound and gap > shift / 4:
        return "SKIP", f"{text}; rounding hides a change of this size"
    return "PASS" if max(gap, restored) <= 4 * bound else "FAIL", text


def one_of_each_kind(policy: nn.Module) -> dict[str, Tensor]:
    """Return a trained parameter of each kind, from different layers: names without their numbers are kinds."""
    kinds: dict[str, list[tuple[str, Tensor]]] = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            kinds.setdefault(kind_of(name), []).append((name, p))
    return dict(members[i % len(members)] for i, members in enumerate(kinds.values()))
