"""The code that all command lines share, the Python API, sweeps, the models of the demo and of the README."""
