"""Stands between the network and the endpoints.

It closes slow connections, refuses strangers and large bodies, and cancels the work of clients that left.

A web page in a browser on this machine can send requests here. The browser names the page in Origin or Sec-Fetch-Site; if the
page's owner makes a name of his point to this address (DNS rebinding), Host is that name. All three are refused.
"""

import asyncio
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from secrets import compare_digest
from time import monotonic
from urllib.parse import urlsplit

import h11
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo.extras.serve.prometheus import ServeMetrics
from grpo.extras.serve.refusals import failure

READ = 16_384  # bytes of a connection that are parsed before the others have their turn


class Gate:
    """An ASGI application before another one.

    body: largest body of a request, in bytes.
    api_key: requests need it, except for /health. None: their Host header must be an IP address or a name of this machine.
    """

    def __init__(self, app: ASGIApp, metrics: ServeMetrics, body: int, api_key: str | None = None) -> None:
        self.app, self.metrics, self.body = app, metrics, body
        self.key = api_key.encode() if api_key else None
        self.names = {"localhost", socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it. Status 499 is a client that left before its answer."""
        status, began = 499, monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = dict(scope["headers"])
            self.check_page(headers)
            self.check_key(scope["path"], headers)
            body = await self.read(headers, receive)
            if body is not None:
                await self.attend(scope, body, receive, counted)
        except HTTPException as error:
            await failure(error.status_code, error.detail, error.headers, scope["path"])(scope, receive, counted)
        finally:
            self.metrics.answered(getattr(scope.get("route"), "path", "other"), status, monotonic() - began)

    def check_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HTTPException 403 if a web page of another server sends the request."""
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        if host and not self.key and not self.is_ours(host):
            line = f"Host {host[:80]!r} is not this server's: use its IP address, localhost, or an api_key"
            raise HTTPException(403, line)
        same_origin = not origin or origin.partition("://")[2] == host
        if not same_origin or headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise HTTPException(403, "a web page of another server may not use this one: send it without a browser")

    def is_ours(self, host: str) -> bool:
        """Return whether a Host header is an IP address or a name of this machine."""
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ip_address(name))
        return False

    def check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise HTTPException 401 unless the request has the key, or asks for /health."""
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers:  # as Anthropic's clients send it
            kind, key = b"bearer", headers[b"x-api-key"]
        right = self.key is None or (compare_digest(key, self.key) and kind.lower() == b"bearer")
        if not right and path != "/health":
            line = "this server needs its api_key: send the header Authorization: Bearer KEY"
            raise HTTPException(401, line, {"WWW-Authenticate": "Bearer"})

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; None if the client leaves. Raises HTTPException 413 as soon as it is too large."""
        declared, body, more = int(headers.get(b"content-length", 0)), bytearray(), True
        while more:
            if max(declared, len(body)) > self.body:
                raise HTTPException(413, f"the body has more bytes than limits.body={self.body}: send smaller requests")
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message["body"]
            more = message["more_body"] or len(body) > self.body
        return bytes(body)

    async def attend(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application, and cancel it if the client leaves."""

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        watch = asyncio.ensure_future(left())
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_read() -> Message:
            if unread:
                return unread.pop()
            await asyncio.shield(watch)
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self.app(scope, receive_read, send))
        watch.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            if not watch.done():
                raise
        finally:
            watch.cancel()


class TimedConnection(H11Protocol):
    """A connection that is closed when a request is not complete, or its answer not taken, within `timeout_keep_alive` seconds.

    uvicorn's own timer, of the same length, starts after an answer and stops at the first byte of the next request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock of the first request."""
        self.clocks: dict[str, asyncio.TimerHandle] = {}
        transport.max_size = READ  # in asyncio 256 KiB: seconds of parsing if each byte is a chunk of its own
        super().connection_made(transport)
        self.time("request", True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        for name in [*self.clocks]:
            self.time(name, False)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Let the clock of a request run until the request is complete."""
        super().handle_events()
        self.time("request", self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def pause_writing(self) -> None:
        """Start the clock of an answer that the client does not take."""
        super().pause_writing()
        self.time("answer", True)

    def resume_writing(self) -> None:
        """Stop the clock of the answer."""
        super().resume_writing()
        self.time("answer", False)

    def time(self, name: str, runs: bool) -> None:
        """Start the clock of this name unless it runs, or stop it."""
        if not runs and name in self.clocks:
            self.clocks.pop(name).cancel()
        elif runs and name not in self.clocks:
            self.clocks[name] = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP in the form of the other errors."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = failure(400, "the request is not HTTP/1.1, or its headers are too large", {"Connection": "close"})
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=answer.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
