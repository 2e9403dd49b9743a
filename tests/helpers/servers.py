"""Real vLLM servers for all tests that ask for them: a start is half a minute of computing."""

import asyncio

import pytest


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the servers' model."""
    import torch

    from helpers.models import model_folder

    torch.set_num_threads(1)
    return model_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def pair(served_model, tmp_path_factory):
    """Two servers that take files and adapters. They have the weights that the last test has sent."""
    from grpo.extras.vllm_server.http import RemoteServer
    from grpo.extras.vllm_server.launch import Servers
    from helpers.models import CONTEXT

    args = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT, "max_lora_rank": 8}
    servers = Servers(served_model, "lora", count=2, args=args, logs=tmp_path_factory.mktemp("logs"))
    servers.start_all()
    try:
        for port, url in zip(servers.ports, servers.urls, strict=True):
            asyncio.run(RemoteServer(url, 10.0, "", lambda port=port: servers.ended(port)).answers(250.0))
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="session")
def launched(served_model, tmp_path_factory):
    """An engine with a server of its own, in a folder that is empty otherwise. test_server.py, the last to use it, closes it."""
    from grpo.extras.vllm_server.engine import VLLMServerEngine
    from helpers.models import CONTEXT

    folder, args = tmp_path_factory.mktemp("launched"), {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}
    engine = VLLMServerEngine(served_model, folder=str(folder / "weights"), launch=True, args=args, logs=folder)
    yield engine
    engine.close()
