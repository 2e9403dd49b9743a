"""vLLM and the trainer on one copy of the weights: the engine reads what the optimizer writes.

vLLM's own loader shows which part of its storage belongs to which parameter, so no layer is named here.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.engines.context import Bound
from grpo.engines.vllm.engine import VLLMEngine, import_vllm
from grpo.extras.shared_weights.lora import adapter_of, args_of, base_parameters, runner, swap
from grpo.models.adapted import refuse_quantized
from grpo.system.errors import UserError
from grpo.system.memory import storage_of
from grpo.system.ranges import Count


class VLLMSharedEngine(VLLMEngine):
    """Samples with vLLM in this process, from the trainer's own weights.

    The first load turns every parameter of the policy into a view of vLLM's memory that holds the policy's values. Afterwards
    the policy may be changed only in place, and never while the engine samples.

    rank: the rank of the policy's LoRA adapter, which is copied at every load; None if there is no adapter. dtype: the policy's.
    sleeps: between rollouts the KV cache's memory is freed, the weights stay. The other arguments are those of `VLLMEngine`.
    """

    apart = False

    def __init__(
        self,
        path: str,
        rank: Count | None = None,
        args: Mapping[str, Any] | None = None,
        most_tokens: Bound | None = None,
        **more: Any,
    ) -> None:
        if (ranks := more.get("devices", 1) * more.get("nodes", 1)) > 1:
            raise UserError(f"engine=vllm_shared needs one device, not {ranks}: set engine=vllm, or trainer.devices=1")
        self._places: dict[str, Tensor] = {}  # by name: the view of vLLM's memory for each of the policy's parameters
        super().__init__(path, args=args_of(args, rank), most_tokens=most_tokens, **more)

    def _open(self) -> None:
        with live_weights():
            super()._open()

    @property
    def shared_bytes(self) -> int:
        """Bytes of the policy that the engine uses too: after the first load all but the adapter's."""
        return sum(place.nbytes for place in self._places.values())

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Copy only an adapter. The first call binds the policy's parameters; every call checks that they are still bound."""
        if version == self.version:
            check_bound(model, self._places)
        super().load_weights(model, version)

    def _take(self, model: nn.Module) -> None:
        adapter = adapter_of(model, self._llm) if isinstance(model, PeftModel) else None
        self._places = self._places or bind(runner(self._llm), model)
        check_bound(model, self._places)
        self._lora_request = adapter and swap(self._llm, adapter)

    def _release(self) -> None:
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False


@contextmanager
def live_weights() -> Iterator[None]:
    """Build vLLM inside this context so that its linear layers read their weights; on a CPU it would pack private copies."""
    import_vllm()
    import vllm.model_executor.layers.utils as layers

    def read(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:  # a convolution, whose kernel reads only packed weights: `check_plain` refuses it
            pack(layer, remove_weight)

    pack, layers.dispatch_cpu_unquantized_gemm = layers.dispatch_cpu_unquantized_gemm, read
    try:
        yield
    finally:
        layers.dispatch_cpu_unquantized_gemm = pack


def bind(runner: Any, model: nn.Module) -> dict[str, Tensor]:
    """Turn the parameters of `model` into views of the memory of vLLM's model. Returns the views by name.

    Everything is checked before anything is bound. A policy on the CPU moves to vLLM's device. Raises UserError if the two cannot
    share weights.
    """
    refuse_quantized(model, "engine=vllm_shared", "engine=vllm")
    engine: nn.Module = runner.get_model()
    check_plain(engine, runner.model_config)
    device = next(engine.parameters()).device
    places: dict[str, Tensor] = {}
    for name, parameter in base_parameters(model):
        if parameter.dtype != runner.model_config.dtype:
            both = f"{parameter.dtype} in the policy and {runner.model_config.dtype} in vLLM"
            raise UserError(f"{name} is {both}: set model.dtype (not auto), and engine.dtype to the same dtype")
        if parameter.device.type != "cpu" and parameter.device != device:
            raise UserError(f"the policy is on {parameter.device}, vLLM on {device}: set engine=vllm")
        places[name] = view_of(engine, name, parameter.data)
    check_covered(engine, places.values())
    for name, parameter in base_parameters(model):
        parameter.data = places[name]
    model.to(device)  # the buffers
    return places


def check_plain(engine: nn.Module, config: Any) -> None:
    """Raise UserError for layers that compute with something other than the weights that their loader writes."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if config.use_mla:
        raise UserError("vLLM stores this model's attention (MLA) weights in a second form too: set engine=vllm")
    for name, module in engine.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            raise UserError(f"vLLM stores {name} in its own form ({type(method).__name__}): set engine=vllm")
        if hasattr(module, "_cpu_unpacked_conv_weight"):
            raise UserError(f"vLLM packs the weights of {name} for this CPU: set engine=vllm")


class Copies(TorchDispatchMode):
    """Records the source and the destination of every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.seen.append((args[1], args[0]))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def view_of(engine: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Let vLLM load `tensor` under its name in a checkpoint. Returns a view of its destination, with the same shape.

    vLLM may copy it in pieces (query, key and value of one matrix), if these are adjacent there as they are in `tensor`.
    """
    try:
        with Copies() as copies:
            engine.load_weights([(name, tensor)])
    except (ValueError, KeyError, AttributeError, AssertionError) as error:  # an unknown name or another shape
        raise UserError(f"vLLM has no {name} that matches the policy's: set engine=vllm") from error
    pieces = [(source, place) for source, place in copies.seen if storage_of(source) == storage_of(tensor)]
    shifts = {
        (storage_of(place), place.storage_offset() - source.storage_offset(), source.stride() == place.stride())
        for source, place in pieces
    }
    if sum(source.numel() for source, _ in pieces) == tensor.numel() and len(shifts) == 1:
        [(_, shift, alike)] = shifts
        place = pieces[0][1].detach()
        whole = place.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + shift)
        if alike and not whole.is_inference() and torch.equal(whole, tensor.to(whole.device)):
            return whole
    raise UserError(f"vLLM stores {name} in another form than the policy, so they cannot share it: set engine=vllm")


def check_covered(engine: nn.Module, places: Iterable[Tensor]) -> None:
    """Raise UserError for weights of vLLM that no parameter is bound to, except rows that pad a vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    starts = [(place.data_ptr(), place.nbytes) for place in places]
    padding = {
        weight: weight[0].nbytes * (module.num_embeddings_padded - module.org_vocab_size)
        for module in engine.modules()
        if isinstance(module, VocabParallelEmbedding)
        for weight in module.parameters()
    }
    for name, weight in engine.named_parameters():
        inside = range(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
        covered = sum(size for start, size in starts if start in inside)
        if weight.is_floating_point() and covered + padding.get(weight, 0) != weight.nbytes:
            raise UserError(f"vLLM's {name} is not fully covered by parameters of the policy: set engine=vllm")


def check_bound(model: nn.Module, places: Mapping[str, Tensor]) -> None:
    """Raise UserError if a parameter of the policy is no longer the view that it was bound to."""
    now, bound = (
        {name: (t.device, t.data_ptr(), t.shape, t.stride()) for name, t in tensors}
        for tensors in (base_parameters(model), places.items())
    )
    if moved := [name for name in now | bound if now.get(name) != bound.get(name)]:
        line = f"the policy's {moved[0]} no longer shares vLLM's memory, as after .to() or load_state_dict(assign=True)"
        raise UserError(f"{line}: change parameters in place, or set engine=vllm")
