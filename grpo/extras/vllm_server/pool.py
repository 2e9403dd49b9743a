"""Servers that share requests, whatever they are asked for: the one client of engines and teachers behind HTTP.

A server that fails is left out, and its request goes to another one. Once it answers again, it is checked, and is used again. If
this process started it, and it has ended, it is started again.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from grpo.extras.vllm_server.http import START, Lost, Odd, Refused, RemoteServer
from grpo.extras.vllm_server.routing import Routes
from grpo.system import distributed
from grpo.system.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE = 1.0  # seconds between two checks of a server that is left out
ATTEMPTS = 5  # failures of one request after which the run ends


@dataclass(eq=False, kw_only=True)
class ServerPool:
    """The servers of a run. Mutable: servers fail and come back, and the label changes.

    wait: seconds without any ready server before an error is raised. concurrency: requests to one server at a time, of all
    threads. label: the weights that every server must hold; None: it has its own.
    """

    called: ClassVar[str]  # what a server is, in messages
    key: ClassVar[str]  # of the configuration
    final: ClassVar[tuple[type[Exception], ...]] = (UserError,)  # what waiting until one is ready cannot mend

    servers: list[RemoteServer]
    wait: float
    concurrency: int = 256
    label: str | None = None
    met: bool = False  # a server has been admitted, or has taken weights
    lock: threading.RLock = field(default_factory=threading.RLock)  # one thread at a time updates servers

    def __post_init__(self) -> None:
        for server in self.servers:
            server.slots = threading.Semaphore(self.concurrency)

    @property
    def context(self) -> int | None:
        """The smallest context among the servers, in tokens; None if no server has reported one."""
        return min((server.context for server in self.servers if server.context), default=None)

    # -- what a kind of servers adds

    async def examine(self, server: RemoteServer) -> None:
        """Look whether a server that answers is what is needed. Raises Lost, Refused, UserError."""

    async def prepare(self, server: RemoteServer) -> None:
        """Do what a server needs before it may be asked. Raises Lost, Refused, UserError."""

    # -- who is there

    async def meet(self, limit: float) -> None:
        """Wait until every server answers and is what is needed. Raises UserError after `limit` seconds."""
        await asyncio.gather(*(self._meet(server, limit) for server in self.servers))

    async def _meet(self, server: RemoteServer, limit: float) -> None:
        begun = time.monotonic()
        while True:
            try:
                await server.answers(limit)
                return await self.examine(server)
            except Odd as odd:
                raise UserError(f"the {self.called} at {odd}: {server.advice}") from odd
            except (Lost, Refused) as fault:
                if time.monotonic() - begun > limit:
                    line = f"no {self.called} answers within {limit:g} s ({fault}): {server.advice}"
                    raise UserError(line) from fault
            await asyncio.sleep(PAUSE)

    async def keep(self, until_one: bool = False) -> None:
        """Update servers that are left out, forever, or with until_one (by whoever has the lock) until each was tried and one is
        ready. Raises UserError if no server was ready for `wait` seconds, while none was loading its model."""
        since = time.monotonic()
        while True:
            # otherwise another thread updates them, or waits until one is ready, and judges how long that takes
            if ours := until_one or self.lock.acquire(blocking=False):
                try:
                    await asyncio.gather(*(self._admit(server) for server in self.servers if not server.ready))
                finally:
                    if not until_one:
                        self.lock.release()
            ready = any(server.ready for server in self.servers)
            if ready and until_one:
                return
            loads = any(time.monotonic() < server.loads_until for server in self.servers)
            if ready or loads:
                since = time.monotonic()
            elif not ours:
                pass
            elif until_one and (
                final := [s.fault for kind in self.final for s in self.servers if isinstance(s.fault, kind)]
            ):
                raise final[0]
            elif time.monotonic() - since > self.wait:
                faults = "; ".join(str(server.fault) for server in self.servers)
                line = f"no {self.called} for {self.key}.wait={self.wait:g} s ({faults})"
                raise UserError(f"{line}: {self.servers[0].advice}")
            await asyncio.sleep(PAUSE)

    async def _admit(self, server: RemoteServer) -> None:
        try:
            if line := server.ended():
                server.start_again(line, START)
                raise Lost(line)
            await server.look(server.alive)
            server.loads_until = 0.0
            await self.prepare(server)
        except (Lost, Refused, UserError) as error:
            # only rank 0 sends weights; if any server refuses the first ones, the run ends
            if isinstance(error, UserError) and not self.met and not distributed.rank():
                raise
            self.leave_out(server, error)
        else:
            if server.fault:
                log.warning("the %s at %s is back", self.called, server.url)
            server.ready, server.fault = True, None

    def leave_out(self, server: RemoteServer, fault: Exception) -> None:
        """Leave a server out until it is back; the first fault is logged."""
        if server.ready or server.fault is None:
            log.warning("a %s is left out until it is back: %s", self.called, fault)
        server.ready, server.fault = False, fault

    # -- requests

    async def share(self, routes: Routes, ask: Callable[[RemoteServer, str | None, int], Awaitable[T]]) -> list[T]:
        """Return `await ask(server, label, i)` for each request i of `routes`, of a server with a free slot. ask: raises Lost
        where another server must be asked. Raises UserError if a request fails ATTEMPTS times, and as `keep`."""
        found: dict[int, T] = {}
        failures: Counter[int] = Counter()
        count = len(routes.prompts)
        waiting: asyncio.Queue[None] = asyncio.Queue()  # an entry for each request in `routes`
        for _ in range(count):
            waiting.put_nowait(None)

        async def work(server: RemoteServer) -> None:
            """Ask the server for one request after another, while it is ready."""
            while True:
                while not server.ready:
                    await asyncio.sleep(0.1)
                await waiting.get()
                if not server.slots.acquire(blocking=False):  # other threads have them all
                    waiting.put_nowait(None)  # for whichever server has one first
                    waiting.task_done()
                    await asyncio.sleep(0.1)
                    continue
                i, label = routes.take(server), self.label
                try:
                    if server.ready:  # checked after the label: a change of label first sets ready to False
                        found[i] = await ask(server, label, i)
                        server.starts = 0
                except Lost as lost:
                    self.leave_out(server, lost)
                    failures[i] += 1
                    if failures[i] == ATTEMPTS:
                        line = f"a request to a {self.called} failed {ATTEMPTS} times, the last error: {lost}"
                        raise UserError(line) from lost
                finally:
                    server.slots.release()
                if i not in found:
                    routes.put(i)
                    waiting.put_nowait(None)
                waiting.task_done()

        slots = range(min(self.concurrency, count))
        workers = [work(server) for _ in slots for server in self.servers]  # round-robin
        tasks = [asyncio.ensure_future(task) for task in [waiting.join(), self.keep(), *workers]]
        over, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if errors := [error for task in over if (error := task.exception())]:
            raise errors[0]
        return [found[i] for i in range(count)]
