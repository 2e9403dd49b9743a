"""Programs: the command line, sweeps, the server, the demo's models."""
