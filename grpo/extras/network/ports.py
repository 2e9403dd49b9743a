"""Checks whether a port is free, and names the process that holds it."""

import errno
import socket

import psutil

from grpo.system.errors import UserError


def check_port(host: str, port: int) -> None:
    """Raises UserError if no program can listen at this address. It names the process that holds the port, and leaves it alone.

    port: 0 is any free one.
    """
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise UserError(f"port={port} is no port: take a number from 1 to 65535, or 0 for any that is free")
    if not host:
        raise UserError("host= is empty: give 127.0.0.1 for this machine only, or 0.0.0.0 for every machine")
    try:
        socket.create_server((host, port), family=family(host)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = error.strerror or error
            line = f"host={host} port={port}: no program can listen there ({reason})"
            raise UserError(f"{line}: choose others") from error
        raise UserError(f"port={port} is held by {holder(port)}: choose another port, or end that process") from error


def family(host: str) -> socket.AddressFamily:
    """The address family of a host name: IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def holder(port: int) -> str:
    """Return the process that listens at a port as text, as far as this user may see it."""
    try:
        ends = psutil.net_connections("tcp")
        listeners = (end for end in ends if end.status == psutil.CONN_LISTEN)
        pid = next(end.pid for end in listeners if end.laddr.port == port and end.pid)
        process = psutil.Process(pid)
        return f"{process.name()} (pid {pid}, user {process.username()})"
    except (psutil.Error, StopIteration):
        return "a process that this user may not see"
