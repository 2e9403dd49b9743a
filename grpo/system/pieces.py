"""Splits a list into pieces of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_pieces(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists of total size at most `most`; a larger item is a list of its own."""
    piece: list[T] = []
    filled = 0
    for item in items:
        if piece and filled + size(item) > most:
            yield piece
            piece, filled = [], 0
        piece.append(item)
        filled += size(item)
    if piece:
        yield piece
