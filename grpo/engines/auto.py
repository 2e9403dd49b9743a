"""The engine for whoever does not care which: vLLM where a GPU and vLLM are there, else the built-in one."""

import logging
from importlib.util import find_spec

import torch

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine

log = logging.getLogger(__name__)


def auto_engine(path: str) -> Engine:
    """path: the model, for vLLM; the built-in engine samples from the trained model itself."""
    there = {"GPU": torch.cuda.is_available(), "vllm": find_spec("vllm") is not None}
    if missing := [name for name in there if not there[name]]:
        log.info("engine: the built-in one (engine=transformers), there is no %s here", " and no ".join(missing))
        return TransformersEngine()
    from grpo.engines.vllm.engine import VLLMEngine

    log.info("engine: vLLM (engine=vllm)")
    return VLLMEngine(path)
