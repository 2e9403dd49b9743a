"""Does this program pass its tests? It runs in a sandbox."""
