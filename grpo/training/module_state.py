"""The module's part of a checkpoint. A run resumes only with the model that it started with.

A state is what a run has learned or counted, and comes from the checkpoint. A setting is what the configuration says: it never
does. Where a state begins with a setting, as an adaptive coefficient does, it begins anew if a resuming command changes that one.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import lightning as L
from torch import nn

from grpo.system.distributed import is_sharded
from grpo.system.errors import UserError
from grpo.system.metrics import about
from grpo.training.checkpoints import check_shapes
from grpo.training.optimization import Unscaled, set_changed


class ModuleState(L.LightningModule):
    """Saves and loads what GRPOModule has besides the weights: its progress, and a reference that moves. noted: see `note`."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, float] = {}
        # the settings of each group of the optimizer, by this command and by that of the checkpoint
        self.given: list[dict[str, Any]] = []
        self.given_before: list[dict[str, Any]] = []

    def note(self, name: str, value: float) -> None:
        """Add a number to the metrics of this rollout, from any hook of a callback. Raises UserError if the name is taken."""
        if name in self.noted or about(name):
            raise UserError(f"the metric {name!r} is taken: give yours another name")
        self.noted[name] = float(value)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["policy_shapes"] = self.policy_shapes()
        rollouts = self.updates // self.algorithm.updates_per_rollout
        checkpoint["progress"] = {"updates": self.updates, "rollouts": rollouts, "optimizer": self.given}
        checkpoint["progress"] |= self.entropy.state_dict()
        checkpoint["progress"]["loss_scale"] = self.scale.state_dict()
        checkpoint |= {name: state for name, part in self.parts.items() if (state := part.state_dict())}
        if self.reference is not None and self.reference.moves:
            checkpoint["reference"] = self.reference.weights
        named = self.policy.named_parameters(remove_duplicate=False)  # tied weights under both names
        frozen = {f"policy.{name}" for name, parameter in named if not parameter.requires_grad}
        for name in frozen & checkpoint["state_dict"].keys():  # with an adapter the base is not saved again
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        if missing := [name for name in ("policy_shapes", "progress") if not checkpoint.get(name)]:
            raise UserError(f"this is no whole checkpoint of a run: {missing[0]} is missing in its state.json")
        check_shapes(checkpoint["policy_shapes"], self.policy_shapes())
        progress, each = checkpoint["progress"], self.algorithm.updates_per_rollout
        self.updates = progress.get("rollouts", progress["updates"] // each) * each  # each may have changed
        self.given_before = progress.get("optimizer", [])
        self.entropy.load_state_dict(progress)
        if progress.get("loss_scale"):
            self.scale.load_state_dict(progress["loss_scale"])
        if self.reference is not None and self.reference.moves and "reference" in checkpoint:
            self.reference.load(checkpoint["reference"])
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint.get(name, {}))

    def on_train_start(self) -> None:
        """Give the optimizer and the schedule of a checkpoint the settings of this command."""
        if self.updates:
            [optimizer], [config] = self.trainer.optimizers, self.trainer.lr_scheduler_configs
            set_changed(optimizer, self.given, self.given_before)
            config.scheduler = self.optim.continued(optimizer, self.num_updates, self.updates)

    @cached_property
    def scale(self) -> Unscaled:
        """The scale of the loss."""
        return self.optim.loss_scale.made() if self.optim.loss_scale else Unscaled()

    @property
    def by_hand(self) -> bool:
        """Whether `step` averages gradients over ranks, and not DistributedDataParallel, which sees no masters, and waits for a
        gradient of each parameter."""
        return self.has_masters or (self.parts.alone and not is_sharded(self.policy))

    def position(self) -> dict[str, Any]:
        """Return what repeating the next update needs, besides weights and tokens: `updates` so far, its `rollout` from 1, the
        seed, and the state of the entropy's controller."""
        rollout = self.updates // self.algorithm.updates_per_rollout + 1
        return {"updates": self.updates, "rollout": rollout, "seed": self.seed, "entropy": self.entropy.state_dict()}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that learn, by name."""
        return {name: p for name, p in [*self.policy.named_parameters(), *self.of_parts()] if p.requires_grad}

    def of_parts(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters beside the policy's, by name."""
        for name, child in self.named_children():
            if child is not self.policy:
                yield from child.named_parameters(prefix=name)

    def policy_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the policy, and of what else learns, by name."""
        tensors = self.policy.state_dict() | dict(self.of_parts())
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
