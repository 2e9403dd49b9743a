"""How much a request may ask for, and the errors about too much. Knows neither HTTP nor tokens."""

from dataclasses import dataclass

from grpo.system.errors import UserError
from grpo.system.ranges import Count, Seconds, enforced


class Oversized(UserError):
    """A request asks for more than a limit allows."""


class Crowded(Exception):
    """The queue is full."""


@enforced("limits")
@dataclass(frozen=True)
class RequestLimits:
    """The largest request that a server takes.

    body: bytes. prompt: characters of a text or of a conversation. samples: prompts times n.
    tokens: the prompt and max_tokens of each sample. queue: requests that are tokenized, wait or are sampled at a time.
    seconds: for a client to send a whole request, and to take its answer from the network; an unused connection stays open as
    long.
    """

    body: Count = 8_388_608
    prompt: Count = 1_000_000
    samples: Count = 2048
    tokens: Count = 1_048_576
    queue: Count = 512
    seconds: Seconds = 30.0

    def check(self, name: str, amount: int, unit: str) -> None:
        """Raise Oversized if a request asks for more of this limit. unit: what is counted."""
        if amount > (most := getattr(self, name)):
            raise Oversized(f"{amount} {unit} are more than limits.{name}={most}: ask for less in a request")
