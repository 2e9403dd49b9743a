"""Plugged into vLLM, in this process or in a server's: a way for new weights, and exact log-probabilities.

An entry point of vLLM's (`vllm.general_plugins`) calls `register` wherever this package is installed. Nothing else changes
until vLLM is built with `weight_transfer_config={"backend": "grpo"}`.
"""

from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

BACKEND = "grpo"


def register() -> None:
    for backend, module, name in (
        (BACKEND, __name__, "Transfer"),
        (f"{BACKEND}_nccl", f"{__name__}_nccl", "NcclTransfer"),
    ):
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)


@dataclass
class NoInit(WeightTransferInitInfo):
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights, by the names of the checkpoint: tensors here, a safetensors file for a server."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    file: str | None = None


class Transfer(WeightTransferEngine[NoInit, Bucket]):
    """Through vLLM's own layer-wise loading, which packs again what it has packed."""

    init_info_cls, update_info_cls = NoInit, Bucket

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exact_logprobs()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket) -> None:
        tensors = load_file(update_info.file).items() if update_info.file else update_info.tensors
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(
                module, ParallelLMHead
            ):  # on a CPU one tied to the embedding keeps a packed copy of the old weights
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*args, **kwargs) -> None:
        """vLLM 0.26 asks for it; the trainer's side is the engines'."""


def exact_logprobs() -> None:
    """Have vLLM's sampler tell log softmax(logits / temperature) over the whole vocabulary, as `Engine.sample` wants it.

    vLLM itself offers raw ones (at temperature 1, and over what a grammar allows) or processed ones (renormalised over what
    the filters left), never those in between, which are what the trainer computes.
    """
    if getattr(Sampler, "_exact", False):
        return
    forward, mask = Sampler.forward, gpu_model_runner.apply_grammar_bitmask
    now: dict[str, Tensor | None] = {"temperature": None, "unmasked": None}  # of the step that is being sampled

    def masked(scheduler_output, grammar_output, input_batch, logits: Tensor) -> None:
        now["unmasked"] = logits.clone()
        mask(scheduler_output, grammar_output, input_batch, logits)

    def tempered(self, logits, sampling_metadata, *args, **kwargs):
        now["temperature"] = sampling_metadata.temperature  # [requests]; None where all are greedy
        try:
            return forward(self, logits, sampling_metadata, *args, **kwargs)
        finally:
            now["temperature"] = now["unmasked"] = None

    def compute_logprobs(logits: Tensor) -> Tensor:
        logits = (logits if now["unmasked"] is None else now["unmasked"]).float()
        if (temperature := now["temperature"]) is not None:
            logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        return logits.log_softmax(dim=-1)

    gpu_model_runner.apply_grammar_bitmask = masked
    Sampler.forward, Sampler.compute_logprobs, Sampler._exact = tempered, staticmethod(compute_logprobs), True


register()
