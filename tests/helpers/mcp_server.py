"""A server of the Model Context Protocol, by the protocol's own SDK: python mcp_server.py."""

import base64
import os
import sys
from io import BytesIO

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent
from PIL import Image

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
def draw(width: int) -> list[TextContent | ImageContent]:
    """Draw a red rectangle."""
    file = BytesIO()
    Image.new("RGB", (width, 4), (255, 0, 0)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return [TextContent(type="text", text="red"), ImageContent(type="image", data=data, mimeType="image/png")]


@server.tool()
def leave(reason: str) -> str:
    """End the server."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    server.run()
