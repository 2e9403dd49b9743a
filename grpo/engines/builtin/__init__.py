"""The built-in engine: samples from the very model that learns."""
