"""Tools of a server of the Model Context Protocol, which this process starts and talks to over stdin and stdout.

Specification: https://modelcontextprotocol.io. The client is the protocol's own SDK, the package `mcp`.
"""

import asyncio
import atexit
import logging
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

from grpo.env.messages import ToolSpec
from grpo.extras.tools.env import ToolError
from grpo.extras.tools.programs import program_variables
from grpo.system.errors import UserError
from grpo.system.files import strict_json

log = logging.getLogger(__name__)
SECONDS = 60.0  # for a server to start, and for one call
GRACE = 5.0  # seconds for a server to end


class ToolServer:
    """One server, started by its first call and, if it has ended, by the next one. May be used by many threads at once.

    command: the words of the program. It has this process's environment, and is stopped when this process ends.
    """

    def __init__(self, command: str) -> None:
        self.command, self.words = command, shlex.split(command)
        self.lock = threading.Lock()
        self.client: Any = None
        self.loop = asyncio.new_event_loop()  # of its own: a user's coroutine that blocks the shared one stops no tool
        threading.Thread(target=self.loop.run_forever, name="mcp", daemon=True).start()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - the stderr of the server, until the end
        atexit.register(self.stop)

    def wait(self, coroutine: Coroutine) -> Any:
        """Return the result of a coroutine on the loop of the server. Raises TimeoutError after SECONDS."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(SECONDS)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the MCP server {self.command!r} gave no answer in {SECONDS:g} s") from None

    async def serve(self, ready: Future) -> None:
        """Hold the connection, from start to end: its contexts belong to one task."""
        from mcp import Client, StdioServerParameters, stdio_client

        try:
            there = StdioServerParameters(command=self.words[0], args=self.words[1:], env=program_variables())
            async with Client(stdio_client(there, errlog=self.errors)) as client:
                self.over = asyncio.Event()
                ready.set_result(client)
                await self.over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def connected(self) -> Any:
        """Return the client of a server that runs. Raises ConnectionError or TimeoutError if it does not start."""
        with self.lock:
            if self.client is None:
                ready: Future = Future()
                self.task = asyncio.run_coroutine_threadsafe(self.serve(ready), self.loop)
                try:
                    self.client = ready.result(SECONDS)
                except TimeoutError:
                    self.task.cancel()
                    raise TimeoutError(f"the MCP server {self.command!r} did not start in {SECONDS:g} s") from None
                except Exception as error:
                    raise ConnectionError(
                        f"the MCP server {self.command!r} did not start: {self.last_line(error)}"
                    ) from error
            return self.client

    def tools(self) -> list["Tool"]:
        """Return the tools of the server, as functions for `ToolEnv`."""

        async def listed(client: Any) -> list[Any]:
            page = await client.list_tools()
            found = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
            return found

        found = self.wait(listed(self.connected()))
        return [Tool(self, ToolSpec(one.name, one.description or one.name, one.input_schema)) for one in found]

    def call(self, name: str, arguments: dict[str, Any]) -> str | list[Any]:
        """Return what a tool says, in parts if it shows pictures. Raises ToolError for its refusal, ConnectionError if the server
        has ended, TimeoutError."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = self.connected()
        try:
            result = self.wait(client.call_tool(name, arguments))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            line = f"the MCP server {self.command!r} has ended: {self.last_line(error)}"
            with self.lock:
                if self.client is client:  # the first to notice
                    log.warning("%s; the next call starts it again", line)
                    self.end()
            raise ConnectionError(line) from error
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        if any(part.type == "image" for part in result.content):
            return [pictured(part) for part in result.content]
        return text or strict_json(result.structured_content, ensure_ascii=False)

    def last_line(self, error: Exception) -> str:
        """Return the last line that the server wrote to stderr, else the error."""
        written = os.fstat(self.errors.fileno()).st_size
        end = os.pread(
            self.errors.fileno(), 4096, max(0, written - 4096)
        )  # leaves the server's place in the file as it is
        lines = end.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else str(error)

    def end(self) -> None:
        """Let go of the server."""
        self.client = None
        self.loop.call_soon_threadsafe(self.over.set)

    def stop(self) -> None:
        """Stop the server, and wait until it has ended."""
        if self.client is not None:
            self.end()
            with suppress(TimeoutError):
                self.task.result(GRACE)


class Tool:
    """A tool of a server, which `ToolEnv` takes in place of a function."""

    def __init__(self, server: ToolServer, spec: ToolSpec) -> None:
        self.server, self.spec, self.__name__ = server, spec, spec.name

    def __call__(self, **arguments: Any) -> str | list[Any]:
        return self.server.call(self.spec.name, arguments)


def pictured(part: Any) -> Any:
    """Return a part of an answer as `ToolEnv` reads it."""
    if part.type != "image":
        return getattr(part, "text", f"[{part.type}]")
    return {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}


def mcp_tools(command: str) -> list[Tool]:
    """Return the tools of the server that this command starts, once in this process. Raises UserError if there is none."""
    words = shlex.split(command)
    if not words or not shutil.which(words[0], path=program_variables()["PATH"]):
        raise UserError(f"task.tools=mcp:{command}: there is no such program; give one, as 'mcp:python my_server.py'")
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(f"task.tools=mcp:... needs the package mcp: pip install -e '.[mcp]' ({error})") from error
    try:
        tools = _server(command, os.getpid()).tools()
    except OSError as error:
        raise UserError(f"task.tools=mcp:{command}: {error}") from error
    if not tools:
        raise UserError(f"task.tools=mcp:{command}: the server has no tools")
    return tools


@cache
def _server(command: str, process: int) -> ToolServer:
    """Return the server of a command. process: a fork has servers of its own."""
    return ToolServer(command)
