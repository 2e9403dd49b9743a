"""Repeats an update that was skipped, and shows the tokens at which a number is not finite."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from grpo.extras.preflight.learning import backward
from grpo.models.policy import with_adapter
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError, plural
from grpo.system.loading import not_finite
from grpo.training.checkpoints import PlainCheckpoints, fault_of
from grpo.training.module import GRPOModule

SHOWN = 10  # tokens


def replay(config: DictConfig) -> None:
    """Print the gradient of a skipped update, with the weights before it, and where its numbers are not finite.

    Raises UserError if `config.replay` is no update that a run has written.
    """
    file = Path(config.replay)
    saved = PlainCheckpoints().load_checkpoint(file) if fault_of(file) is None else {}
    if "weights" not in saved:
        raise UserError(f"replay={config.replay} is no skipped update: give RUN/skipped/UPDATE.ckpt")
    trainer = instantiate(config.trainer)(callbacks=[], logger=[])
    pretrained = instantiate(config.model)
    policy = with_adapter(pretrained.model(), instantiate(config.adapter)).to(trainer.strategy.root_device)
    for name, p in policy.named_parameters():
        if name in saved["weights"]:
            p.data.copy_(saved["weights"][name])
    plan, algorithm, optim = map(instantiate, (config.rollout, config.algo, config.optim))
    make = instantiate(config.module)
    module: GRPOModule = make(policy, algorithm, optim, plan.sampling.temperature, plan.num_rollouts, config.seed)
    module.entropy.load_state_dict(saved["entropy"])
    tokens = replace(saved["tokens"], valuing=None)  # the weights of a critic are not saved
    tokens = tokens.to(trainer.strategy.root_device)
    with trainer.precision_plugin.forward_context():
        loss, seen = repeated(module, tokens)
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    broken = not_finite(gradients.items())
    norm = torch.stack([grad.float().norm() for grad in gradients.values()]).norm()
    what = f"update {saved['updates']}, rollout {saved['rollout']}: {plural(len(tokens), 'row')}"
    print(f"{what}, loss {loss:.4g}, gradient norm {norm:.4g}")
    first = f", first {broken[0]}" if broken else ""
    print(f"gradients that are not finite: {len(broken)} of {len(gradients)}{first}")
    lines = list(broken_places(tokens, seen, pretrained.tokenizer()))
    print(f"tokens with a number that is not finite: {len(lines)}")
    for line in lines[:SHOWN]:
        print(f"  {line}")


def repeated(module: GRPOModule, tokens: TokenBatch) -> tuple[float, dict[str, Tensor]]:
    """Add the gradients of an update. Returns the loss, and the numbers of its tokens, [B, C] each."""
    total, seen = 0.0, {}
    for rows, microbatch in module.microbatches(tokens, torch.arange(len(tokens), device=tokens.ids.device)):
        loss, numbers = backward(module, microbatch)
        total += loss
        for name, values in numbers.items():
            place = seen.setdefault(name, torch.zeros_like(tokens.rollout_logprobs))
            place[rows, : microbatch.completion_width] = values.float()
    return total, seen


def broken_places(tokens: TokenBatch, seen: dict[str, Tensor], tokenizer: Any) -> Iterator[str]:
    """Yield a line for each sampled token with a number that is not finite: its row and place, its text, and these numbers."""
    shape = tokens.mask.shape
    given = {**vars(tokens), **seen, "given": None}  # advantages that came with samples; NaN is none
    of_tokens = {name: x for name, x in given.items() if x is not None and x.shape == shape}
    numbers = {name: x for name, x in of_tokens.items() if x.is_floating_point()}
    wrong = {name: ~x.isfinite() & tokens.mask for name, x in numbers.items()}
    for row, at in torch.stack([*wrong.values()]).any(0).nonzero().tolist():
        text = tokenizer.decode([int(tokens.ids[row, at - shape[1]])])
        shown = ", ".join(f"{name} {float(numbers[name][row, at])}" for name in wrong if wrong[name][row, at])
        yield f"row {row} (sample {int(tokens.sample[row])}), token {at} {text!r}: {shown}"
