"""Ranks that stay: processes that train one command line after another."""

import os
import socket
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from helpers.programs import server

LIMIT = 300  # seconds for one run


class Ranks:
    """Processes with the numbers 0 to count - 1, each a rank that somebody else than Lightning has started."""

    def __init__(self, count: int) -> None:
        context = server()
        pipes = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=work, args=(i, theirs)) for i, (_, theirs) in enumerate(pipes)]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the end of the process ends the pipe

    def train(self, count: int, overrides: Sequence[str]) -> None:
        """Train on the first `count` ranks, and wait for them. Raises AssertionError with the trace of one that fails, and
        EOFError for one that is killed."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for pipe in self.pipes[:count]:
            pipe.send((port, list(overrides)))
        traces = []
        for i, pipe in enumerate(self.pipes[:count]):
            assert pipe.poll(LIMIT), f"rank {i} of {count} does not end: {overrides}"
            traces.append(pipe.recv())
        assert not any(traces), "\n".join(filter(None, traces))

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()


def work(rank: int, pipe: Connection) -> None:
    """Train each command line that comes, together with the other ranks, and answer None or a trace."""
    import torch.distributed as dist
    from conftest import compose_config
    from lightning.pytorch.utilities import rank_zero_only

    from train import train

    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    rank_zero_only.rank = rank  # as lightning does when it is imported
    while True:
        port, overrides = pipe.recv()
        os.environ["MASTER_PORT"] = str(port)
        trace = None
        try:
            train(compose_config(*overrides))
        except BaseException:
            trace = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(trace)
