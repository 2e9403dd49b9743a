"""A LoRA adapter of the policy in vLLM in this process, passed on in memory. The base belongs to `shared`."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from grpo.engines.vllm.engine import import_vllm
from grpo.models.language import beside_language
from grpo.system.errors import UserError, one_line

ADAPTER = 1  # vLLM counts adapters from 1; there is one


def args_of(args: Mapping[str, Any] | None, rank: int | None) -> dict[str, Any]:
    """Return arguments for vLLM in this process, with room for an adapter of this rank; None: no adapter.

    Raises UserError for arguments that would put the model into other processes, which tensors cannot be passed to.
    """
    args = dict(args or {})
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (args.get(name) or 1) > 1:
            raise UserError(f"engine.args.{name}={args[name]}: this engine uses only the trainer's device: take 1")
    if rank is None:
        return args
    import_vllm()
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    if not 1 <= rank <= max(ranks):
        raise UserError(f"engine.rank={rank} (it follows adapter.r): vLLM takes 1 to {max(ranks)}")
    return args | {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(r for r in ranks if r >= rank)}


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what is sampled with, with the names of the base model's checkpoint: no adapter, no vision tower, tied ones once."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    beside = tuple(f"{name}." for name in beside_language(base))
    for name, parameter in base.named_parameters():
        if "lora_" not in name and not name.startswith(beside):
            yield name.replace(".base_layer", ""), parameter


def runner(llm: Any) -> Any:
    """Return vLLM's model runner, the object in this process that holds its model and adapters."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def adapter_of(model: PeftModel, llm: Any) -> Any:
    """Return a copy of the policy's adapter as vLLM's LoRAModel.

    Raises UserError for adapters that vLLM does not support, and for parts of them that vLLM would silently ignore.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    worker = getattr(runner(llm), "lora_manager", None)
    if worker is None:
        raise UserError("the policy has an adapter that the engine was not built for: set engine.rank to its rank")
    kind, active = model.active_peft_config.peft_type, len(model.active_adapters)
    if active != 1 or kind != "LORA":
        raise refused(f"of type {kind}, {active} active; it serves one LoRA")
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and layer.lora_variant:
            raise refused(f"{type(*layer.lora_variant.values()).__name__} at {name}")
    manager = worker._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    # a plain init here: the engine's base is the trainer's, with the changes that an init (PiSSA, OLoRA) made to it
    config = model.active_peft_config.to_dict() | {"init_lora_weights": True}
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(worker.lora_config)
        tensors = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER,
            {name: tensor.detach().clone() for name, tensor in tensors.items()},  # vLLM scales B in place
            helper,
            device=str(worker.device),
            dtype=worker.lora_config.lora_dtype,
            model_vocab_size=worker.vocab_size,
            weights_mapper=mapper and mapper.get_rename_mapper(),  # without stacking
        )
    except ValueError as error:
        raise refused(str(error)) from error
    adaptable = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if unknown := [name for name in adapter.loras if name not in adaptable]:
        raise refused(f"it has no adapter at {unknown[0]}; take that out of adapter.target_modules")
    return adapter


@torch.no_grad()
def swap(llm: Any, adapter: Any) -> Any:
    """Replace the engine's adapter, if it has one, by this one. Returns the request with which vLLM samples from it."""
    from vllm.lora.request import LoRARequest

    manager = runner(llm).lora_manager._adapter_manager
    manager.remove_adapter(ADAPTER)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER)
    return LoRARequest("policy", ADAPTER, "memory")


def refused(why: str) -> UserError:
    """Return the error about an adapter that vLLM cannot serve."""
    line = f"vLLM cannot serve this adapter: {one_line(why).rstrip('.')}"
    return UserError(f"{line}; engine=vllm merges most kinds, engine=transformers takes any")
