"""Settings of sampling that only vLLM's engines take: the form of a completion, and some parameters of vLLM's
requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from grpo.system.errors import UserError
from grpo.system.ranges import Range, Whole, require

NOT_APART = (  # after rollout.ahead=N
    "needs an engine with its own copy of the weights: set engine=vllm or engine=vllm_server, or without vLLM "
    "engine=transformers_copy; the built-in one and vllm_shared sample from the weights that the update changes"
)

GUIDES = ("regex", "json", "grammar", "choice")
Penalty = Annotated[float, Range(-2, 2)]
Bias = Annotated[float, Range(-100, 100)]
PARAMETERS: dict[str, Any] = {  # with vLLM's names and ranges, since vLLM would clamp a bias silently
    "min_tokens": Whole,
    "ignore_eos": bool,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "logit_bias": Mapping[Whole, Bias],
    "bad_words": Sequence[str],
}


def check_only_vllm(guided: Mapping[str, Any] | None, vllm: Mapping[str, Any] | None) -> None:
    """Raise UserError for values of `Sampling.guided` and `Sampling.vllm` that vLLM does not take."""
    if guided is not None and (len(guided) != 1 or not guided.keys() <= set(GUIDES)):
        raise UserError(f"sampling.guided={dict(guided)} must have exactly one key of {', '.join(GUIDES)}")
    for name, value in (vllm or {}).items():
        if name not in PARAMETERS:
            raise UserError(f"sampling.vllm has no {name!r}, only {', '.join(PARAMETERS)}")
        require(f"sampling.vllm.{name}", value, PARAMETERS[name])


def refuse_only_vllm(guided: Mapping[str, Any] | None, vllm: Mapping[str, Any] | None) -> None:
    """Raise UserError for an engine that has none of these settings."""
    if names := [*(["guided"] if guided else []), *(vllm or {})]:
        raise UserError(f"the built-in engine does not take {', '.join(names)}: set engine=vllm, or leave them out")
