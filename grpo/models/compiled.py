"""Functions of tensors that a GPU runs as compiled kernels, and that are computed operation by operation
elsewhere."""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo.system.errors import UserError
from grpo.system.output.console import busy

log = logging.getLogger(__name__)


class Compiled:
    """A function whose first argument is a tensor of rows, compiled where that is on one of `devices`.

    The number of rows is symbolic, so that few graphs are made. If a graph cannot be made (no compiler, an
    error of it, too many graphs), a warning has the reason, and the function is called as it is from then on.
    Mutable: failed.
    """

    def __init__(
        self, function: Callable[..., Any], devices: Collection[str] = ("cuda",), backend: str = "inductor"
    ) -> None:
        self.function, self.devices, self.backend = function, devices, backend
        self.failed = False

    # pieces, not the model: its layers gain next to nothing on a CPU, and every new shape is compiled (results.md)
    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The function that compiles itself when it is called. Made late, because it imports much."""
        return torch.compile(self.function, backend=self.backend, fullgraph=True)

    def takes(self, first: Tensor) -> bool:
        """Return whether the function is compiled for such a tensor. One row would be a graph of its own."""
        plain = type(first) is Tensor  # and no tensor of a forecast
        return not self.failed and plain and first.device.type in self.devices and len(first) > 1

    def __call__(self, first: Tensor, *others: Any) -> Any:
        if self.takes(first):
            for each in (first, *others):
                if isinstance(each, Tensor):
                    torch._dynamo.maybe_mark_dynamic(each, 0)
            try:
                with first_said(f"compiling {self.function.__name__} for this device", "compiled" in vars(self)):
                    return self.compiled(first, *others)
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:  # a compiler may raise anything
                self.failed = True
                line = "%s is not compiled (%s): its operations run one by one, which is slower"
                log.warning(line, self.function.__name__, reason_of(error))
        return self.function(first, *others)


@contextmanager
def first_said(what: str, said: bool = False) -> Iterator[None]:
    """Log before a `with` block what it does, and afterwards how long that took: it may take minutes. said: not again."""
    level, begun = logging.DEBUG if said else logging.INFO, time.perf_counter()
    log.log(level, "%s: this may take minutes", what)
    with busy(what):
        yield
    log.log(level, "%s: done in %.0f s", what, time.perf_counter() - begun)


def reason_of(error: BaseException) -> str:
    """Return the type of an exception, or of the one that a compiler raised, and the first line of its
    message."""
    error = getattr(error, "inner_exception", error)
    return " ".join(f"{type(error).__name__}: {error}".strip().splitlines()[:1])
