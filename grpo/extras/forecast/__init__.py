"""The memory that a run will take, counted before it starts, and the choices that follow from it. Doors: `forecast`, `device`.

The run's own module is built from tensors without memory. Sizes counts the bytes of its parts, `forecast` logs them.
"""
