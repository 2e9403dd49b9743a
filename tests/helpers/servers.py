"""Real vLLM servers for all tests that ask for them: a start is half a minute of computing."""

import os

import pytest


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the servers' model."""
    import torch

    from helpers.models import model_folder

    torch.set_num_threads(1)
    return model_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def launched(served_model, tmp_path_factory):
    """An engine that has started two servers, which take files and adapters, in a folder that is empty otherwise. test_server.py,
    the last to use it, closes it."""
    from grpo.extras.vllm_server.engine import URLS, VLLMServerEngine
    from helpers.models import CONTEXT

    folder = tmp_path_factory.mktemp("launched")
    args = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}
    args |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        files = str(folder / "weights")
        engine = VLLMServerEngine(served_model, folder=files, launch=True, count=2, args=args, logs=folder)
    os.environ.pop(URLS)  # for the ranks of a run
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def pair(launched):
    """Two servers. They have the weights that the last test has sent."""
    return launched._launched
