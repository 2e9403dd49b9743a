"""Counts in sentences."""


def plural(count: int, noun: str, more: str = "") -> str:
    """Return a count with its noun: `1 job`, `2 jobs`, `1,000 jobs`. more: the plural, if it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else more or noun + 's'}"
