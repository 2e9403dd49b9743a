"""Tools: the forms in which model families write calls, parsers of calls, MCP servers. Door: `renderer`, `task.tools`."""
