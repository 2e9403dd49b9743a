"""vLLM's errors in one line, with advice about those of memory, by their text. vLLM is not imported here: a
server's log has the same texts.

vLLM's share of a device can be too small for its model and cache, or larger than what is free: the two need
opposite advice.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo.system.errors import UserError

SHARE = "engine.args.gpu_memory_utilization, vLLM's share of the device"
CACHE = "or engine.args.kv_cache_memory_bytes where that is set, as on a CPU"
ROOM = (
    "or make room: engine=vllm_shared holds one copy of the weights, engine.sleeps=true frees vLLM's memory meanwhile"
)
# a part of vLLM's text, in lower case, and what helps; the first that occurs counts
# by text, since vLLM raises the same ValueError or RuntimeError for all of them
ADVICE = {
    # the share holds the model, and too little is left in it
    "to serve at least one request": f"raise {SHARE} ({CACHE}), or lower engine.args.max_model_len",
    "no available memory for the cache blocks": f"raise {SHARE} ({CACHE}), or lower engine.args.max_num_seqs",
    "cannot auto-fit max_model_len": f"raise {SHARE} ({CACHE})",
    "exceeds available mamba cache": f"lower engine.args.max_num_seqs, or raise {SHARE}",
    "externally held weights": f"raise {SHARE}",
    # less is free than the share
    "free memory on device": f"lower {SHARE}, {ROOM}",
    "on startup is less than desired cpu memory": f"lower {SHARE}, or set engine.args.kv_cache_memory_bytes",
    "is less than requested memory for kv": "lower engine.args.kv_cache_memory_bytes",
    # what vLLM needs beside its cache, or the trainer does
    "when warming up sampler": f"lower engine.args.max_num_seqs, or {SHARE}",
    "error in memory profiling": "another process freed memory of the device meanwhile: start again once it has ended",
    "out of memory": f"lower {SHARE}, or engine.args.max_num_seqs, {ROOM}",
    "memory": f"lower engine.args.max_num_seqs or max_model_len, or change {SHARE} ({CACHE})",
}


def memory_advice(text: str) -> str | None:
    """Return what to do about an error of vLLM that is one of memory; None if it is another one."""
    text = " ".join(text.lower().split())
    return next((fix for part, fix in ADVICE.items() if part in text), None)


@contextmanager
def short_errors(building: bool = False) -> Iterator[None]:
    """Turn vLLM's long errors into one line: about too little memory, and while it is built (building) about
    arguments."""
    try:
        yield
    except UserError:
        raise
    except (torch.OutOfMemoryError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        # below pydantic's heading
        [*_, line] = re.split("Value error, |Assertion failed, ", str(error), maxsplit=1)
        line = line.partition("\n")[0].strip()
        if fix := memory_advice(str(error)):
            raise UserError(f"vLLM found too little memory ({line}): {fix}") from error
        if building:
            raise UserError(f"vLLM cannot be built with these engine.args, or for this model: {line}") from error
        raise
