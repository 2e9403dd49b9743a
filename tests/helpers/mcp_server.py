"""A server of the Model Context Protocol, by the protocol's own SDK: python mcp_server.py."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("words")
WORDS = {"en": {"otter": "a river mammal"}, "de": {"Otter": "ein Marder"}}


@server.tool()
def lookup(word: str, language: str = "en") -> str:
    """Look a word up in the dictionary."""
    if word not in WORDS[language]:
        raise ToolError(f"{word} is in no dictionary")
    return WORDS[language][word]


@server.tool()
def sums(numbers: list[int]) -> dict[str, int]:
    """Add numbers. The process says its id."""
    return {"sum": sum(numbers), "process": os.getpid()}


@server.tool()
def leave(reason: str) -> str:
    """End the server."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    server.run()
