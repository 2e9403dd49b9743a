"""A vLLM server that takes a connection and says nothing."""

import asyncio

import pytest

from grpo.extras.vllm_server import http


def test_a_silent_server_is_lost_after_the_limit(monkeypatch):
    async def wait() -> None:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        await http.RemoteServer(f"http://127.0.0.1:{port}", timeout=30, advice="", ended=lambda: None).answers(0.1)

    monkeypatch.setattr(http, "CONNECT", 0.2)
    with pytest.raises(http.Lost, match=r"did not answer within 0.1 s: silence"):
        asyncio.run(wait())
