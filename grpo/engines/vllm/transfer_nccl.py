"""vLLM's weight transfer over NCCL, together with the exact log-probabilities. Imported only when a server asks for it."""

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo.engines.vllm.transfer import exact_logprobs


class NcclTransfer(NCCLWeightTransferEngine):
    """vLLM's own NCCL transfer; building it also makes log-probabilities exact."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        exact_logprobs()
