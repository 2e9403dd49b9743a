"""The appendices. Each folder is one; the first line of its __init__.py says what it adds, and the door by which it comes in."""
