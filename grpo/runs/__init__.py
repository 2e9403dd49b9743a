"""The files of a run: its manifest, its code, its tables."""
