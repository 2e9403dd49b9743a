"""Clients of servers share this: the form of addresses, and one line about an answer that cannot be read."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

from grpo.system.errors import UserError, one_line


@contextmanager
def reading(where: str, answer: Any, fault: type[Exception]) -> Iterator[None]:
    """Raise `fault`, with the address and the answer, if the block cannot read it: a part is missing, or another value."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = f", {error}" if type(error) is ValueError else f", without {error}" if type(error) is KeyError else ""
        shown = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        raise fault(f"{where} answers what cannot be read{reason}: {one_line(shown, 200)}") from error


def addresses(urls: Sequence[str], key: str, fix: str = "") -> list[str]:
    """Return addresses of servers, each once. key: that gives them. fix: the end of the error. Raises UserError."""
    given = [*urls]
    try:
        wrong = [url for url in map(httpx2.URL, given) if url.scheme not in ("http", "https") or not url.host]
    except (TypeError, httpx2.InvalidURL):
        wrong = given
    if wrong or not given:
        raise UserError(f"{key}={given} must name servers, as [http://HOST:PORT]{fix}")
    return [*dict.fromkeys(url.rstrip("/") for url in given)]
