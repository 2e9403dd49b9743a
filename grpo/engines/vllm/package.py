"""vLLM as a package: which versions this project takes, how it is imported for this process, and two mends of its CPU build."""

import os
import sys

from packaging.specifiers import SpecifierSet

from grpo.engines.vllm.settings import INSTALL
from grpo.system.errors import UserError

VERSIONS = ">=0.32,<0.34"  # this engine uses vLLM's internals: docs/engines.md says what was tried with each


def import_vllm() -> None:
    """Import vLLM for use in this process. Raises UserError with the install command if it is missing or of
    another version."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
    # `transfer.exact_logprobs` patches the first model runner
    if (given := os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")) != "0":
        line = f"VLLM_USE_V2_MODEL_RUNNER={given}, and log-probabilities of that runner are those at temperature 1"
        raise UserError(f"{line}: unset the variable, so that this engine takes the first one")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"engine=vllm needs vLLM ({error}): {INSTALL}") from error
    if vllm.__version__ not in SpecifierSet(VERSIONS, prereleases=True):
        raise UserError(f"vLLM {vllm.__version__} is not a supported version ({VERSIONS}): {INSTALL}")


def mend_cpu_build() -> None:
    """Mend vLLM's CPU build, which would compile for 20 s at its first call, and fails beside numba."""
    import vllm.v1.sample.sampler as sampler

    # its helper for token ranks is compiled, and ranks are not used here
    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)
    # it takes the `__dict__` of whatever numba's modules hold, which a draft has loaded; the library of llvmlite
    # answers with a function of that name
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab.setdefault("__dict__", {})
