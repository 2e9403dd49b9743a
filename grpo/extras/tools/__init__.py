"""Tools: their environment (env.py), the forms in which models write calls, parsers of calls, conversations in JSON, MCP servers.

Door: `renderer`, `task.tools`.
"""

NEEDS = ("images",)  # pictures that tools return
