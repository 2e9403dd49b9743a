"""Sharding: each rank holds a part of every parameter, of its gradient and of the optimizer's state (FSDP2, arXiv 2304.11277).

A layer is whole on every rank while it computes, so a pass through the model is a message between all ranks: they must make the
same number of passes. Parts are cut along the first dimension. The parameters that learn are float32, whatever the passes compute
in, and so they are the masters of 16-bit parameters.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.optim import SGD, Adam, AdamW, Optimizer

from grpo.extras.devices.watched import Watched
from grpo.models.adapted import without_adapter
from grpo.models.gradient_checkpointing import layers_of
from grpo.models.master_weights import LOW
from grpo.system.distributed import local, part_of
from grpo.system.errors import UserError
from grpo.training.checkpoints import PlainCheckpoints
from grpo.training.module import GRPOModule
from grpo.training.optimization import learned_by
from grpo.training.trainer import MIXED

RIGHT = (Adam, AdamW, SGD)  # treat each number by itself, so that a part of a parameter learns as the whole one


class Sharded(Watched, ModelParallelStrategy):
    """Lightning's strategy for a model that `share` has sharded, with checkpoints of this project.

    ranks: all devices of all machines. reshard: whether a layer is given up between its forward and its backward pass. pieces:
    whether each rank writes its own part of a checkpoint. precision: of passes, bf16-mixed or 16-mixed for parameters in float32.
    """

    def __init__(self, timeout: float, ranks: int, reshard: bool, pieces: bool, precision: str) -> None:
        # offloaded gradients are on the CPU
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        super().__init__(timeout, data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend=backend)
        self.reshard, self.pieces, self.passes = reshard, pieces, precision

    def share(self, module: GRPOModule) -> None:
        """Shard the policy, the reference and the critic of a module, which have the same values on all ranks. Raises UserError
        for a policy that sees: a rank without pictures would have to take part in the passes of the tower."""
        if hasattr(without_adapter(module.policy).get_decoder(), "eyes"):
            raise UserError(
                "strategy=fsdp2 shares out no policy that sees: set strategy=ddp (adapter=lora takes less memory)"
            )
        mesh = self.device_mesh["data_parallel"]
        reference, offload = module.reference, module.optim.offload
        copies = [reference.copy] if reference and reference.copy is not None else []
        for model in [module.policy, *copies, *getattr(module, "critic", nn.Module()).children()]:
            wanted = getattr(model, "config", module.policy.config).get_text_config().dtype or torch.float32
            low = wanted if wanted in LOW else MIXED.get(self.passes)
            shard(model, mesh, wanted, low, self.reshard, offload and self.root_device.type != "cpu")
        if reference is not None:
            reference.begin()
        for part in module.parts.values():
            part.shared()

    @contextmanager
    def while_sampling(self, model: nn.Module) -> Iterator[None]:
        """Let the built-in engine sample from the policy on each rank by itself in a `with` block."""
        with unsharded(model), self.precision_plugin.forward_context():
            yield

    # -- Lightning

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Build the optimizers. Raises UserError for one whose step needs whole parameters."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if type(optimizer) not in RIGHT or (isinstance(optimizer, SGD) and optimizer.defaults["fused"]):
                names = ", ".join(kind.__name__ for kind in RIGHT)
                line = f"optim.optimizer: {type(optimizer).__name__} is not known to be right on parts of parameters"
                raise UserError(f"strategy=fsdp2: {line}; take {names} of torch.optim (SGD not fused), or strategy=ddp")

    def model_to_device(self) -> None:
        """Do nothing: `share` has moved the model, and offloaded parts stay on the CPU."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module, with sharded tensors, in the number type of the model's files."""
        stored = self.lightning_module.policy.stored_in
        state = self.lightning_module.state_dict()
        return {name: x.to(stored) if x.is_floating_point() else x for name, x in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with sharded tensors, as it is without sharding."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        state = inner.state_dict()
        if self.lightning_module.policy.stored_in in LOW:
            state["masters"] = [p.detach() for p in learned_by(inner)]
        return state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint whose tensors are read when they are needed."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, lazily=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's parts of the weights."""
        ours = self.lightning_module.state_dict()
        with torch.no_grad():
            for name, saved in checkpoint["state_dict"].items():
                ours[name].copy_(part_of(saved, ours[name]))

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning calls `load_optimizer_state_dict`."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's parts of the optimizers' states."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):  # or none
            learned = learned_by(optimizer)
            states = {
                i: {name: state_part(x, learned[i]) for name, x in values.items()}
                for i, values in saved["state"].items()
            }
            optimizer.load_state_dict({"state": states, "param_groups": saved["param_groups"]})
            with torch.no_grad():
                for p, master in zip(learned, saved.get("masters", ()), strict=False):
                    p.copy_(part_of(master, p))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; all ranks take part."""
        PlainCheckpoints().save_checkpoint(checkpoint, filepath, "pieces" if self.pieces else "whole")


def state_part(saved: Any, parameter: Tensor) -> Any:
    """Return this rank's part of an entry of an optimizer's state. An entry of another shape than its parameter, such as the
    number of steps, is the same on all ranks."""
    return part_of(saved, parameter) if getattr(saved, "shape", None) == parameter.shape else saved


def shard(
    model: nn.Module, mesh: DeviceMesh, wanted: torch.dtype, low: torch.dtype | None, reshard: bool, offload: bool
) -> None:
    """Shard a model in place: its layers, if it has a configuration, and everything else together. After a pass without gradient
    nothing stays whole, since a change of the parameters would not reach it.

    wanted: the number type of the model. low: what passes compute in, None for `wanted`.
    """
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False) if low else MixedPrecisionPolicy()
    settings = {"mesh": mesh, "mp_policy": policy}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy()

    def give_up(layer: FSDPModule, *_: Any) -> None:
        if not torch.is_grad_enabled() and not model.is_whole:
            layer.reshard()

    for layer in layers_of(model) if hasattr(model, "config") else ():
        convert(layer, wanted)
        fully_shard(layer, reshard_after_forward=reshard, **settings)
        layer.register_forward_hook(give_up)
    convert(model, wanted)
    fully_shard(model, reshard_after_forward=True, **settings)
    model.computes_in, model.stored_in, model.reshards, model.is_whole = low or wanted, wanted, reshard, False
    model.one_pass = lambda function, *arguments: function(model, *arguments)
    register_fsdp_forward_method(model, "one_pass")


def convert(part: nn.Module, wanted: torch.dtype) -> None:
    """Give the parameters that are not sharded yet the number type that sharded ones have: those that learn are float32."""
    for p in part.parameters():
        if local(p) is p:
            p.data = p.data.to(wanted).to(torch.float32 if p.requires_grad else wanted)


def parts(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that are sharded together: the layers and the root."""
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Keep all parameters whole on every rank in a `with` block. A pass is then no message, so that ranks may differ in them."""
    if model.is_whole:
        yield
        return
    model.is_whole = True
    for part in parts(model):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts(model):
            part.reshard()
            part.set_reshard_after_forward(part is model or model.reshards, recurse=False)
        model.is_whole = False
