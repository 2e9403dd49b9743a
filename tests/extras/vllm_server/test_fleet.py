"""Servers that this process started, and that end, without vLLM."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest

from grpo.extras.vllm_server import http, pool
from grpo.extras.vllm_server.fleet import Fleet
from grpo.extras.vllm_server.http import STARTS, RemoteServer
from grpo.extras.vllm_server.sync import Disk
from grpo.system.errors import UserError


def test_a_server_that_ends_at_once_is_started_three_times(monkeypatch, tmp_path):
    started, looks = [], count()
    for module in (pool, http):  # a clock that goes on by a millisecond when somebody looks at it
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(looks) / 1000))
    server = RemoteServer("http://127.0.0.1:9", 1, "see the log", lambda: "it ended", lambda: started.append(1))
    monkeypatch.setattr(pool, "PAUSE", 0.01)
    servers = Fleet(servers=[server], way=Disk(tmp_path), last_id=0, wait=0.05, label="run-0", met=True)
    for times in (1, 2):
        server.starts = 0  # as after a completion
        with pytest.raises(UserError, match=r"no vLLM server for engine\.wait=0\.05 s \(it ended\): see the log"):
            asyncio.run(servers.keep())
        assert len(started) == times * STARTS


def test_the_wait_begins_when_a_server_should_have_loaded_its_model(monkeypatch, tmp_path):
    looks = count()
    for module in (pool, http):  # a clock that goes on by 10 ms when somebody looks at it
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(looks) / 100))
    monkeypatch.setattr(pool, "PAUSE", 0.001)
    server = RemoteServer("http://127.0.0.1:9", 1, "see the log", lambda: None, loads_until=0.5)
    servers = Fleet(servers=[server], way=Disk(tmp_path), last_id=0, wait=0.05, label="run-0", met=True)
    with pytest.raises(UserError, match=r"no vLLM server for engine\.wait=0\.05 s"):
        asyncio.run(servers.keep())
    assert next(looks) > 55
