"""engine=auto: vLLM if there is a GPU and vLLM is installed, else the built-in engine."""

import logging
from importlib.util import find_spec
from typing import Any

import torch

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.context import Bound
from grpo.engines.protocol import Engine
from grpo.engines.vllm.settings import INSTALL
from grpo.system.ranges import Count

log = logging.getLogger(__name__)


def auto_engine(
    path: str,
    devices: Count = 1,
    nodes: Count = 1,
    most_tokens: Bound | None = None,
    head_dtype: str | None = None,
    sight: Any = None,
) -> Engine:
    """Return vLLM if there is a GPU and vLLM is installed, else the built-in engine; the log says which.

    path: the model that vLLM loads; devices, nodes, most_tokens, sight: see `VLLMEngine`; head_dtype: as `model.head_dtype`. The
    built-in engine needs none of them, since it samples from the model being trained.
    """
    has = {"GPU": torch.cuda.is_available(), "vllm": find_spec("vllm") is not None}
    if missing := [name for name in has if not has[name]]:
        line = f"engine: the built-in one (engine=transformers), because there is no {' and no '.join(missing)}"
        if has["GPU"]:
            log.warning("%s: vLLM samples faster; %s, or set engine=transformers", line, INSTALL)
        else:
            log.info(line)
        return TransformersEngine()
    from grpo.engines.vllm.engine import VLLMEngine

    log.info("engine: vLLM (engine=vllm)")
    args = {"hf_overrides": {"head_dtype": head_dtype}} if head_dtype else None
    return VLLMEngine(path, devices=devices, nodes=nodes, most_tokens=most_tokens, args=args, sight=sight)
