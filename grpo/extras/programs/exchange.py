"""Two processes of a tested program talk: requests, results, and plain data.

A value has one of Python's own types (see `encode`; subclasses are reduced to them) and is copied in an encoding of
ours, since unpickling runs code. Anything else stays in its process, and the other side gets a `Remote`, which asks for
each attribute, item or call.

`sandbox_child` imports this file on a bare interpreter: only the standard library, and little of it.
"""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing them would double the start of each process
    from collections.abc import Callable
    from typing import Any

LARGEST = 16 << 20  # bytes of one message
DEEPEST = 100  # containers inside one another
_NAMED = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, object)
NAMED = {kind.__name__: kind for kind in _NAMED}
CONTAINERS = {b"l": list, b"t": tuple, b"e": set, b"z": frozenset, b"d": dict}
REBUILT: dict[str, Callable[[Any], tuple]] = {  # type -> the arguments that make an equal value
    "builtins.range": lambda x: (x.start, x.stop, x.step),
    "builtins.bytearray": lambda x: (bytes(x),),
    "fractions.Fraction": lambda x: (x.numerator, x.denominator),
    "decimal.Decimal": lambda x: (str(x),),
    "collections.deque": lambda x: (list(x), x.maxlen),
    "datetime.date": lambda x: (x.year, x.month, x.day),
    "datetime.timedelta": lambda x: (x.days, x.seconds, x.microseconds),
}


class CannotTravelError(Exception):
    """A test passes something to the program that is neither plain data nor a function."""


class Remote:
    """An object of the other process. Each use of it asks there; it equals only itself."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)


def _asking(name: str) -> Callable:
    return lambda self, *args: self._peer.ask(name, self, *args)


ITERATION = {"__iter__": iter, "__next__": next}
OPERATIONS = ITERATION | {f"__{function.__name__}__": function for function in (len, bool, str, repr, int, float)}
OPERATIONS["__getitem__"] = lambda x, key: x[key]
for _name in OPERATIONS:
    setattr(Remote, _name, _asking(_name))


def call_it(function: Any, /, *args: Any, **named: Any) -> Any:
    """Return what the function returns."""
    return function(*args, **named)


class Peer:
    """One end of the pair of pipes. operations: what the other end may ask for, by name.

    exportable: whether an object that is no plain data may be lent to the other end.
    """

    def __init__(self, source: int, sink: int, operations: dict[str, Callable], exportable: Callable) -> None:
        self.source, self.sink, self.operations, self.exportable = source, sink, operations, exportable
        self.lent: dict[int, Any] = {}

    def ask(self, operation: str, /, *args: Any, **named: Any) -> Any:
        """Return the result of an operation of the other end. Raises its exception, or the built-in one nearest to it."""
        self.send(encode(("ask", operation, args, named), self))
        while True:
            kind, *rest = self.receive()
            if kind == "ask":
                self.answer(*rest)
            elif kind == "raised":
                raise _exception(*rest, ended=operation == "__next__")
            else:
                result, after = rest
                for mine, changed in zip(args, after if result is None else (), strict=False):
                    _change(mine, changed)
                return result

    def answer(self, operation: str, args: tuple, named: dict) -> None:
        """Do what the other end asks for, and send it the result, or the exception."""
        try:
            result = self.operations[operation](*args, **named)
            reply = encode(("done", result, args if result is None else ()), self)
        except BaseException as error:
            if not isinstance(error, (StopIteration, CannotTravelError)):
                show_error(error)
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = encode(("raised", names, _text(error)), self)
        flush()  # the process may be killed after its last answer
        self.send(reply)

    def serve(self) -> None:
        """Answer until the other end closes."""
        while True:
            _, operation, args, named = self.receive()
            self.answer(operation, args, named)

    def lend(self, value: Any) -> int:
        """Keep an object for the other end, and return its number."""
        if not self.exportable(value):
            raise CannotTravelError(f"a test passes an object of type {type(value).__name__} to the program")
        number = id(value)
        self.lent[number] = value
        return number

    def send(self, data: bytes) -> None:
        """Write a message: its size in four bytes, then itself."""
        if len(data) > LARGEST:
            raise ValueError(f"a value of {len(data)} bytes is too large")
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            rest = rest[os.write(self.sink, rest) :]

    def receive(self) -> Any:
        """Return the next message of the other end. Raises EOFError if there will be none."""
        size = int.from_bytes(self.read(4), "big")
        if size > LARGEST:
            raise ValueError(f"a message of {size} bytes is too large")
        return decode(self.read(size), self)

    def read(self, size: int) -> bytes:
        """Return exactly this many bytes."""
        parts = []
        while size:
            parts.append(os.read(self.source, min(size, 1 << 20)))
            if not parts[-1]:
                raise EOFError("the other process has ended")
            size -= len(parts[-1])
        return b"".join(parts)


def _change(mine: Any, changed: Any) -> None:
    """Give a mutable argument the content that the called function left in its copy."""
    if type(mine) is not type(changed):
        return
    if isinstance(mine, (list, bytearray)):
        mine[:] = changed
    elif isinstance(mine, (set, dict)):
        mine.clear()
        mine.update(changed)


def _exception(names: list, text: str, ended: bool) -> Exception:
    """Return the built-in exception nearest to one of the other end, by the names of its classes.

    ended: whether it may be StopIteration. Raised by a call, it would end a loop of the test early, as `for x in map(f, ...)`.
    """
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and (ended or kind is not StopIteration):
            try:
                return kind(text)
            except TypeError:  # UnicodeDecodeError takes five arguments
                continue
    return RuntimeError(f"{names[0]}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


def flush() -> None:
    """Write out what was printed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the disk limit, or an object that the program put there
        pass


def show_error(error: BaseException) -> None:
    """Print an exception to standard error, without the lines of these files."""
    try:  # an exception of the program may fail at being printed
        trace = error.__traceback__
        ours = show_error.__code__.co_filename.rpartition("/")[0]
        while trace and trace.tb_frame.f_code.co_filename.rpartition("/")[0] == ours:
            trace = trace.tb_next
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)
    except BaseException:
        pass


def encode(value: Any, peer: Peer | None = None, depth: int = 0) -> bytes:
    """Return a value as bytes: a letter for its type, its size, and its content. Objects that are no plain data are lent."""
    if value is None or value is True or value is False:
        return b"N" if value is None else b"T" if value else b"F"
    if isinstance(value, int):
        return b"i%x;" % value  # hexadecimal, which takes linear time
    if isinstance(value, float):
        return b"f%b;" % float.hex(value).encode()
    if isinstance(value, complex):
        return b"c" + encode(value.real) + encode(value.imag)
    if isinstance(value, (str, bytes)):
        data = str.encode(value, errors="surrogatepass") if isinstance(value, str) else bytes(value)
        return b"%b%d;%b" % (b"s" if isinstance(value, str) else b"b", len(data), data)
    for letter, kind in CONTAINERS.items():
        if isinstance(value, kind):
            if depth > DEEPEST:
                raise ValueError(f"more than {DEEPEST} containers inside one another")
            # of a dictionary: key, value, key, value, ...
            is_dict = kind is dict
            items = [item for pair in dict.items(value) for item in pair] if is_dict else list(kind.__iter__(value))
            return b"%b%d;" % (letter, len(items)) + b"".join(encode(item, peer, depth + 1) for item in items)
    if isinstance(value, Remote):
        return b"r%x;" % value._number
    if isinstance(value, type) and NAMED.get(value.__name__) is value:
        return b"n%b;" % value.__name__.encode()
    if parts := REBUILT.get(name := f"{type(value).__module__}.{type(value).__qualname__}"):
        return b"x" + encode(name) + encode(parts(value), peer, depth + 1)
    return b"o%x;" % peer.lend(value)


def decode(data: bytes, peer: Peer | None = None) -> Any:
    """Return the value that `encode` wrote. Runs no code, whatever the bytes are; raises an Exception if they are none of its."""
    value, end = _decoded(data, 0, peer)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_SHORT = {
    b"i": lambda text, peer: int(text, 16),
    b"f": lambda text, peer: float.fromhex(text),
    b"n": lambda text, peer: NAMED[text],
    b"r": lambda text, peer: peer.lent[int(text, 16)],
    b"o": lambda text, peer: Remote(peer, int(text, 16)),
}


def _decoded(data: bytes, at: int, peer: Peer | None) -> tuple[Any, int]:
    letter, at = data[at : at + 1], at + 1
    if letter in _CONSTANTS:
        return _CONSTANTS[letter], at
    if letter in (b"c", b"x"):
        first, at = _decoded(data, at, peer)
        second, at = _decoded(data, at, peer)
        if letter == b"c":
            return complex(first, second), at
        texts = any(isinstance(part, str) for part in second)  # Fraction("1e999999999") would take years
        if first not in REBUILT or texts != (first == "decimal.Decimal"):
            raise ValueError(f"the type {first} cannot be rebuilt")
        module, _, name = first.rpartition(".")
        return getattr(__import__(module), name)(*second), at
    end = data.index(b";", at)
    number, at = data[at:end].decode(), end + 1
    if letter in _SHORT:
        return _SHORT[letter](number, peer), at
    size = int(number)
    if letter in (b"s", b"b"):
        content = data[at : at + size]
        if len(content) != size:
            raise ValueError("the text is too short")
        return content.decode(errors="surrogatepass") if letter == b"s" else content, at + size
    items = []
    for _ in range(size):
        item, at = _decoded(data, at, peer)
        items.append(item)
    kind = CONTAINERS[letter]
    return kind(zip(items[::2], items[1::2], strict=True)) if kind is dict else kind(items), at
