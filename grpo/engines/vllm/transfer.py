"""A plugin of vLLM, in this process or in a server: takes new weights, draws by seed, and makes
log-probabilities exact.

vLLM's entry point `vllm.general_plugins` calls `register` wherever this package is installed. Nothing else
changes until vLLM is built with `weight_transfer_config={"backend": "grpo"}`.
"""

import math
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_model_runner

from grpo.engines.vllm import draws
from grpo.engines.weights import checksum
from grpo.system.distributed import join_group

BACKEND = "grpo"


def register() -> None:
    """Register the weight transfer backend `grpo` with vLLM."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "Transfer")


@dataclass
class Group(WeightTransferInitInfo):
    """A process group for weights: see `distributed.join_group`. rank: of this server's first worker."""

    address: str = ""
    port: int = 0
    rank: int = 0
    size: int = 0
    kind: str = "gloo"
    timeout: float = 600.0


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights, with their names in the checkpoint: tensors in this process, a safetensors file,
    or a broadcast of the group, of tensors with these names, dtypes and shapes. checksum: of the tensors."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    file: str | None = None
    checksum: int | None = None
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class Transfer(WeightTransferEngine[Group, Bucket]):
    """Loads weights by vLLM's own layer-wise reload, which repeats vLLM's packing of layers."""

    init_info_cls, update_info_cls, group = Group, Bucket, None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exact_logprobs()
        draws.use()

    def init_transfer_engine(self, init_info: Group) -> None:
        """Join the trainer's process group, in place of an earlier one."""
        self.shutdown()
        place = self.parallel_config
        rank = init_info.rank + place.data_parallel_index * place.world_size + place.rank
        self.group = join_group(**vars(init_info) | {"rank": rank}, device=self.device)

    def start_weight_update(self) -> None:
        """Begin an update of all weights."""
        # where experts have a kernel, vLLM would not pack their new weights for it
        if current_platform.is_cpu():
            for module in self.model.modules():
                if hasattr(experts := getattr(module, "quant_method", None), "moe_kernel"):
                    experts.moe_kernel = None
        # not copies into its parameters: vLLM joins and pads those of several layers, in ways of each model
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket of weights."""
        tensors = load_file(update_info.file).items() if update_info.file else update_info.tensors
        if update_info.names:
            tensors = self.received(update_info)
        if update_info.checksum is not None and checksum(tensors) != update_info.checksum:
            raise ValueError(f"{update_info.file or 'a broadcast'} does not hold the weights that the trainer wrote")
        self.model.load_weights(tensors)

    def received(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """Return the tensors of the group's next broadcast, which has the bytes of all, one after the
        other."""
        kinds = [getattr(torch, name) for name in bucket.dtypes]
        sizes = [kind.itemsize * math.prod(shape) for kind, shape in zip(kinds, bucket.shapes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device if self.group.name() == "nccl" else "cpu")
        self.group.broadcast(flat, 0).wait()
        parts = zip(bucket.names, kinds, bucket.shapes, flat.split(sizes), strict=True)
        # clone: aligned
        return [(name, part.clone().view(kind).view(shape)) for name, kind, shape, part in parts]

    def finish_weight_update(self) -> None:
        """End the update: process the loaded layers as vLLM does after reading a checkpoint."""
        finalize_layerwise_reload(self.model, self.model_config)
        # on a CPU a head tied to the embedding would keep a packed copy of the old weights
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.abort()
        self.group = None


def exact_logprobs() -> None:
    """Patch vLLM's sampler to return log softmax(logits / temperature) over the whole vocabulary, as
    `Engine.sample` promises.

    vLLM itself offers raw log-probabilities (at temperature 1, over the tokens that a grammar allows) or
    processed ones (renormalised over the tokens that the filters leave), but not those that the trainer
    computes.
    """
    if getattr(Sampler, "_exact", False):
        return
    forward, mask = Sampler.forward, gpu_model_runner.apply_grammar_bitmask
    verify, gathered = RejectionSampler.forward, RejectionSampler._get_logprobs_tensors
    # values of the step being sampled
    now: dict[str, Tensor | None] = {"temperature": None, "unmasked": None}
    # the same, for the step's drafts: the sampler, which draws the token after a draft, forgets its own
    draft = dict(now)

    # logits: [requests, V]
    def masked(scheduler_output, grammar_output, input_batch, logits: Tensor) -> None:
        now["unmasked"] = logits.clone()
        mask(scheduler_output, grammar_output, input_batch, logits)

    def tempered(self, logits, sampling_metadata, *args, **kwargs):
        now["temperature"] = sampling_metadata.temperature  # [requests]; None if all are greedy
        try:
            return forward(self, logits, sampling_metadata, *args, **kwargs)
        finally:
            now["temperature"] = now["unmasked"] = None

    def compute_logprobs(logits: Tensor) -> Tensor:
        unmasked = logits if now["unmasked"] is None else now["unmasked"]
        return at_temperature(unmasked, now["temperature"]).log_softmax(-1)

    # with a draft the logits of a step are [tokens of all drafts + requests, V], each request's side by side
    def verified(self, metadata, draft_probs, logits, sampling_metadata):
        if not any(metadata.num_draft_tokens):  # on a CPU vLLM's top-k fails without a row
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        temperature = sampling_metadata.temperature
        if temperature is not None:
            temperature = of_rows(temperature, metadata.cu_num_sampled_tokens, len(logits))
        draft["unmasked"], draft["temperature"] = now["unmasked"], temperature
        try:
            return verify(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            draft["unmasked"] = draft["temperature"] = None

    def of_draft(self, most, metadata, logits, target, bonus, ids):
        unmasked = logits if draft["unmasked"] is None else draft["unmasked"]
        exact = at_temperature(unmasked, draft["temperature"])
        places = metadata.target_logits_indices, metadata.bonus_logits_indices
        return gathered(self, most, metadata, logits, *(exact[rows] for rows in places), ids)

    gpu_model_runner.apply_grammar_bitmask = masked
    Sampler.forward, Sampler.compute_logprobs, Sampler._exact = tempered, staticmethod(compute_logprobs), True
    RejectionSampler.forward, RejectionSampler._get_logprobs_tensors = verified, of_draft
    # vLLM's own writes into a copy on a CPU, so that temperatures and filters are whatever the memory held
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = of_rows


def of_rows(values: Tensor, ends: Tensor, rows: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Return the value of the request of each row, [rows], with one value replaced. values, ends: [requests];
    ends: the number of rows up to each request's last one."""
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    values = values[torch.searchsorted(ends, row, right=True)]
    return torch.where(values == replace_from, replace_to, values).to(values.dtype)


def at_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return logits / temperature in float32, [B, V]. temperature: [B], where 0 counts as 1; None: 1 for
    all."""
    logits = logits.float()
    return logits if temperature is None else logits / torch.where(temperature > 0, temperature, 1.0)[:, None]


register()
