"""Which server samples which completion: least load first, then prompts that begin alike.

A server takes a request as soon as it has room, so no request waits while a server is idle. It prefers a prompt that it has read,
because vLLM keeps that part of its KV cache: another sample of the group, or the next turn of an episode.
"""

from collections.abc import Sequence
from typing import Any

BLOCK = 64  # tokens
OWN, NEW, OF_ANOTHER = range(3)  # of a prompt: this server has read it, no server has, another one has


class Routes:
    """The requests of one call that wait. Mutable. homes: by the hash of a prefix, the server that has read it."""

    def __init__(self, prompts: Sequence[Sequence[int]], homes: dict[int, Any]) -> None:
        self.prompts, self.homes = prompts, homes
        self.keys: list[int] = []  # the hash of each prompt
        self.waiting: dict[int, list[int]] = {}  # indices of requests by this hash
        for i, prompt in enumerate(prompts):
            hashes = prefixes(prompt)
            if read := [homes[key] for key in hashes if key in homes]:
                homes[hashes[-1]] = read[-1]  # of the longest prefix
            self.keys.append(hashes[-1])
            self.put(i)

    def put(self, i: int) -> None:
        """Let request i wait."""
        self.waiting.setdefault(self.keys[i], []).append(i)

    def take(self, server: Any) -> int:
        """Return a request for this server: of a prompt that it has read, else of a new one, else of the longest queue."""
        homes, waiting = self.homes, self.waiting

        def rank(key: Any) -> tuple[int, int]:
            if homes.get(key) is server:
                return OWN, 0
            return (OF_ANOTHER, -len(waiting[key])) if key in homes else (NEW, 0)

        key = min(waiting, key=rank)
        homes.setdefault(key, server)
        i = waiting[key].pop(0)
        if not waiting[key]:
            del waiting[key]
        return i

    def done(self, i: int, ids: Sequence[int], server: Any) -> None:
        """Note that the server has read request i and sampled these tokens: the next turn's prompt begins with both."""
        text = [*self.prompts[i], *ids]
        if blocks := len(text) // BLOCK:
            self.homes[prefixes(text[: blocks * BLOCK])[-1]] = server


def prefixes(ids: Sequence[int]) -> list[int]:
    """Return a hash of each prefix that ends with a block of BLOCK tokens, and last of all tokens."""
    hashes = [0]
    for start in range(0, len(ids), BLOCK):
        hashes.append(hash((hashes[-1], *ids[start : start + BLOCK])))
    return hashes[1:] or hashes
