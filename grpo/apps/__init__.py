"""The code that all command lines share, and the Python API."""
