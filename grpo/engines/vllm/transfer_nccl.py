"""VLLM's own way for weights from GPU to GPU, beside the exact log-probabilities. Loaded when a server asks for it."""

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo.engines.vllm.transfer import exact_logprobs


class NcclTransfer(NCCLWeightTransferEngine):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exact_logprobs()
