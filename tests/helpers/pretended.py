"""A pretended device: its tensors say that they are on `lazy:0`, and their numbers are on the CPU.

It shows faults that only a GPU would show otherwise. An operation on tensors of both memories raises, as with CUDA: a copy is
missing. And `waits` counts, by line of code, where the host would wait until the GPU has done all its work: where it reads a
number, where the size of a result depends on numbers, and at each copy that is not queued (`non_blocking`). A queued copy to the
host has arrived after `torch.accelerator.synchronize`; what reads it before that raises. `carried` has the bytes of copies.

A copy is queued if the host's memory is pinned, as with CUDA. Autocast is that of helpers/pretended_autocast.py, and the kernels
of a GPU are those of helpers/pretended_kernels.py, if a test asks for them. It knows no streams and no several devices.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from grpo.system import memory, threads
from grpo.system.memory import storage_of
from helpers.pretended_autocast import autocast, is_on, lowered

ROOT = Path(__file__).parents[2]
LAZY = torch.device("lazy", 0)  # autograd runs it in the calling thread, as it does a CPU
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
# reading a number, and results whose size depends on numbers
READING = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
INSTEAD: dict[Any, Callable[..., Tensor]] = {}  # what computes operations that a CPU lacks, on the inner tensors


class OnDevice(Tensor):
    """A tensor of the pretended device. inner: the tensor on the CPU that has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=LAZY
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        copy = OnDevice(self.inner.clone())
        return nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy

    def tolist(self) -> Any:
        waited("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """In this `with`, the pretended device exists. waits: the number of waits by line and kind; copies: those to the device.

    carried: the bytes copied to the "device" and to the "host". due: the storages of the host that copies are under way to.
    pinned: those that are pinned. elsewhere: the waits of other threads than the one in which the `with` began. compiled: calls
    of compiled functions.
    """

    now: "Pretended | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()
        self.thread = threading.get_ident()
        self.compiled: Counter[str] = Counter()
        self.copies = 0
        self.carried: Counter[str] = Counter()
        self.due: set[int] = set()
        self.pinned: set[int] = set()
        self.changes = ExitStack()

    def __enter__(self) -> "Pretended":
        Pretended.now = self
        run, ours = threads.Background._run, LAZY.type
        enabled, dtype, available = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.amp.is_autocast_available
        for owner, name, new in [
            (torch, ours, torch.cpu),
            (torch, "autocast", partial(autocast, ours)),
            (torch.amp, "autocast", partial(autocast, ours)),
            (torch, "is_autocast_enabled", lambda *kind: is_on() if kind == (ours,) else enabled(*kind)),
            (torch, "get_autocast_dtype", lambda kind: lowered() if kind == ours else dtype(kind)),
            (torch.amp, "is_autocast_available", lambda kind: kind == ours or available(kind)),
            (torch.accelerator, "synchronize", self.synchronize),
            (Tensor, "is_pinned", lambda tensor, *_: storage_of(tensor) in self.pinned),
            (Tensor, "pin_memory", lambda tensor, *_: self.pin(tensor.clone())),
            (threads.Background, "_run", lambda background, make: self.there(partial(run, background, make))),
        ]:
            self.changes.enter_context(patch.object(owner, name, new, create=True))
        memory.PINNED.add(ours)
        self.changes.callback(memory.PINNED.discard, ours)
        self.changes.enter_context(only_lifts_of_the_host())
        return super().__enter__()

    def __exit__(self, *given) -> None:
        super().__exit__(*given)
        self.changes.close()
        Pretended.now = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if is_composite(function):
            with self.again():
                return function.decompose(*args, **kwargs or {})
        kwargs = dict(kwargs or {})
        pins = kwargs.pop("pin_memory", False)
        return self.pin(computed(function, args, kwargs)) if pins else computed(function, args, kwargs)

    def there(self, call: Callable[[], None]) -> None:
        """Call a function in another thread, in which the device exists, too."""
        with self.again(), only_lifts_of_the_host():
            call()

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host, pinned."""
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        self.pinned.add(key)
        weakref.finalize(storage, self.pinned.discard, key)
        return tensor

    @contextmanager
    def again(self) -> Iterator[None]:
        """See the operations of an operation, too."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def clear(self) -> None:
        """Forget what was counted."""
        self.waits.clear()
        self.carried.clear()
        self.copies = 0

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait for all that is queued."""
        waited("synchronize")
        self.due.clear()

    def count(self, *places: str) -> int:
        """Return the number of waits, or of those at lines of the files that these words are in."""
        return sum(n for line, n in self.waits.items() if not places or any(place in line for place in places))

    def table(self) -> str:
        """Return the waits, most frequent first."""
        return "\n".join(f"{n:6d} {line}" for line, n in self.waits.most_common())


@contextmanager
def only_lifts_of_the_host() -> Iterator[None]:
    """Let torch.tensor(..., device=LAZY) be a copy, in this thread."""
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def on_device(module: nn.Module) -> nn.Module:
    """Move the parameters and buffers of a module, in place. Tied ones stay tied."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in moved:
                    moved[tensor] = OnDevice(tensor.detach())
                    if isinstance(tensor, nn.Parameter):
                        moved[tensor] = nn.Parameter(moved[tensor], tensor.requires_grad)
                if tensor is not None:
                    held[name] = moved[tensor]
    return module


def waited(kind: str) -> None:
    """Count a wait at the line of the project that is being run; if there is none, at that of a library."""
    if (now := Pretended.now) is not None:
        (now.waits if threading.get_ident() == now.thread else now.elsewhere)[f"{place()}: {kind}"] += 1


def place() -> str:
    """Return the innermost line of the project, else of a library that it uses."""
    frame, library = sys._getframe(), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((f"{ROOT}/grpo", f"{ROOT}/train.py")):
            return f"{file.removeprefix(f'{ROOT}/')}:{frame.f_lineno}{library}"
        if not library and any(name in file for name in ("/transformers/", "/lightning/", "/torch/optim/")):
            library = f" ({file.rpartition('site-packages/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return library or "a test"


def computed(function, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation, on the memory on which CUDA would have it. Raises RuntimeError if a copy is missing."""
    tensors: list[Tensor] = []
    inner = [mapped(lambda x: inner_of(x, tensors), each) for each in (args, tuple(kwargs.values()))]
    there = [x for x in tensors if isinstance(x, OnDevice)]
    if Pretended.now is not None and Pretended.now.due:
        note_reading(function, tensors)
    device = kwargs.get("device")
    result_there = bool(there) if device is None else torch.device(device).type == LAZY.type
    if there or result_there:
        if function in COPIES:
            note_copy(function, args, kwargs, result_there)
        elif function in BY_INDEX:
            note_index(args)
        elif any(x.dim() for x in tensors if not isinstance(x, OnDevice)):  # a number alone goes with the launch
            shapes = [(tuple(x.shape), "device" if isinstance(x, OnDevice) else "host") for x in tensors]
            raise RuntimeError(f"tensors of the host and of the device meet in {function} at {place()}: {shapes}")
        elif function in READING:
            waited(str(function))
    named = dict(zip(kwargs, inner[1], strict=True))
    if device is not None and result_there:
        named["device"] = torch.device("cpu")
    out = INSTEAD.get(function, function)(*inner[0], **named)
    if not result_there:
        return out
    out = mapped(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(function, args, kwargs, out) if function._schema.is_mutable and there else out


def inner_of(x: Any, tensors: list[Tensor]) -> Any:
    """Return the tensor on the CPU of one on the device, and anything else as it is. Appends tensors to the list."""
    if isinstance(x, Tensor):
        tensors.append(x)
    return x.inner if isinstance(x, OnDevice) else x


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Return x after the function of each of its parts, if it is a list or a tuple. Faster than torch's tree_map."""
    return type(x)(mapped(function, part) for part in x) if type(x) in (list, tuple) else function(x)


@cache
def is_composite(function) -> bool:
    """Return whether an operation consists of others. Only inference mode passes such a one as a whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def note_copy(function, args: tuple, kwargs: dict, result_there: bool) -> None:
    """Count a copy between the two memories."""
    source, queued = (
        (args[1] if function is aten.copy_.default else args[0]),
        kwargs.get("non_blocking", args[2:3] == (True,)),
    )
    from_device = isinstance(source, OnDevice)
    into_device = isinstance(args[0], OnDevice) if function is aten.copy_.default else result_there
    host = args[0] if from_device and function is aten.copy_.default else source
    queued = queued and storage_of(host) in Pretended.now.pinned
    if from_device and not into_device:
        Pretended.now.carried["host"] += source.numel() * source.element_size()
        if queued and function is aten.copy_.default:
            Pretended.now.due.add(storage_of(args[0]))
        else:
            waited("copy to the host")
    elif into_device and not from_device and source.dim() + (function is not aten.copy_.default):
        Pretended.now.copies += 1
        Pretended.now.carried["device"] += source.numel() * source.element_size()
        if not queued:
            waited("copy to the device, not queued")


def note_reading(function, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if an operation reads what a queued copy has not brought to the host yet. Views and writes may go on."""
    views = any(result.alias_info is not None for result in function._schema.returns)
    late = [x for x in tensors if not isinstance(x, OnDevice) and storage_of(x) in Pretended.now.due]
    if late and not views:
        raise RuntimeError(f"{function} reads at {place()} what a queued copy has not brought to the host yet")


def note_index(args: tuple) -> None:
    """Count the waits of an index: its copy from the host, or counting what a mask leaves. Raises RuntimeError if the tensor is
    on the host and the index is not."""
    indices = [i for i in args[1] if i is not None]
    if not isinstance(args[0], OnDevice):
        raise RuntimeError(f"a tensor of the host is indexed by one of the device at {place()}")
    for i in indices:
        if not isinstance(i, OnDevice):
            waited("index in the host's memory")
        elif i.dtype in (torch.bool, torch.uint8):
            waited("mask as an index")
