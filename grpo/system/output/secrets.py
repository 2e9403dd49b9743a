"""Secrets: tokens and passwords never get into a file of a run.

A value is secret if its key says so (api_key, token, password), or its form (user:password@host, hf_..., Bearer ...), or if it is
the value of an environment variable whose name says so. Files have MASK in its place.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo.system.errors import UserError

MASK = "***"
SHORT = 8  # letters; a shorter secret is masked under its key only, since it may be part of a word
NAMED = re.compile(
    r"(?<![a-z])(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!end_)(?<!stop_)"
    r"(token|(api|access|secret|private|auth|signing)_?key|password|passwd|secret|credentials?|authorization)$",
    re.IGNORECASE,
)
FORMS = re.compile(
    r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user:password of a URL
    r"|(?<=://)[\w-]{16,}(?=@)"  # a token before the host
    + "".join(rf"|(?<=[?&]{name}=)[^\s&'\"}},]+" for name in ("token", "key", "api_key", "password"))
    + r"|(?<=Bearer )[\w.~+/-]{8,}=*|(?<=Basic )[\w+/]{12,}=*"
    r"|\b(?:hf_|sk-|pk-|gsk_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|dckr_pat_|npm_|pypi-)[\w-]{16,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"  # a JSON Web Token
)
GIVEN = re.compile(r"([\w.]+)(\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,{}\[\]]+)")  # key=value, also inside {key: value}

_known: set[str] = set()


def is_secret(key: str) -> bool:
    """Return whether the last part of a dotted key names a secret."""
    return bool(NAMED.search(key.rpartition(".")[2]))


def learn(texts: Iterable[str]) -> None:
    """Note the secrets of the environment, and of arguments KEY=VALUE: they are masked wherever they appear."""
    found = [value for name, value in os.environ.items() if is_secret(name.lower())]
    found += [value.strip("'\"") for text in texts for key, _, value in GIVEN.findall(text) if is_secret(key)]
    _known.update(value for value in found if len(value) >= SHORT and value[0] != "/")  # the path of a secret is none


def bearer(variable: str) -> dict[str, str]:
    """Return the header with the key in a variable of the environment; {} if it has none. From now on the key is masked. Raises
    UserError if it is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"${variable} is no key: it has a character that a header cannot have")
    if len(key) >= SHORT:
        _known.add(key)
    return {"Authorization": f"Bearer {key}"}


def hidden(text: str) -> str:
    """Return a text without secrets that are known or have the form of one."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    return FORMS.sub(MASK, text)


def masked_argument(text: str) -> str:
    """Return an argument KEY=VALUE without secrets, also if VALUE is a list or a dictionary."""
    return hidden(GIVEN.sub(lambda m: f"{m[1]}{m[2]}{MASK}" if is_secret(m[1]) else m[0], text))


def masked_values(node: Any, mask: Callable[[str], str] = hidden, key: str = "") -> Any:
    """Return nested settings without secrets. References to the environment, ${oc.env:NAME}, stay.

    mask: for texts whose key is none of a secret; `masked_argument` if they are arguments.
    """
    if isinstance(node, Mapping):
        return {name: masked_values(value, mask, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [masked_values(value, mask, key) for value in node]
    if not isinstance(node, str) or node.startswith("${oc.env:"):
        return node
    return MASK if node and is_secret(key) else mask(node)


class Masking(logging.Filter):
    """Masks secrets in messages of logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the message of a record."""
        record.msg, record.args = hidden(record.getMessage()), ()
        return True


def guard_logs() -> None:
    """Mask what the handlers of the root logger write from now on."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, Masking) for known in handler.filters):
            handler.addFilter(Masking())
