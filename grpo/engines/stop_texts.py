"""Texts that end a completion. Engines know tokens only, so a decode function comes with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class StopTexts:
    """Texts that end a completion: its last token is the one that completes the first of them.

    decode: from token ids to the text that is searched, as a tokenizer's with skip_special_tokens; equal
    texts are equal whatever it is.
    """

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str] = field(compare=False, repr=False)

    @cached_property
    def width(self) -> int:
        """The number of last tokens that certainly hold a text that ends now. A token adds a byte or more, or
        no text at all, as special tokens do, of which there may be eight."""
        return 8 + max(len(text.encode()) for text in self.texts)

    def end(self, ids: Sequence[int]) -> bool:
        """Return whether one of the texts is in that of the last tokens. ids: of a completion that had none
        before."""
        text = self.decode(ids[-self.width :])
        return any(stop in text for stop in self.texts)
