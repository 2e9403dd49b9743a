"""A run that is asked to end: signals.py hears signals whatever the main thread is doing, stop.py ends the run, on all ranks."""
