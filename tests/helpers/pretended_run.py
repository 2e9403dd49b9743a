"""Runs of train.py on the pretended device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.pretended import LAZY, Pretended, on_device


@contextmanager
def device_of_runs() -> Iterator[Pretended]:
    """Let the pretended device be the one of Lightning's trainer, and of its autocast."""
    begin, mixes = SingleDeviceStrategy.__init__, MixedPrecision.__init__
    with ExitStack() as stack:
        for owner, name, new in [
            (CPUAccelerator, "setup_device", lambda self, device: None),
            (
                SingleDeviceStrategy,
                "__init__",
                lambda self, device="cpu", *more, **named: begin(self, LAZY, *more, **named),
            ),
            (SingleDeviceStrategy, "model_to_device", lambda self: on_device(self.model)),
            (MixedPrecision, "__init__", lambda self, kind, device, *more: mixes(self, kind, LAZY.type, *more)),
        ]:
            stack.enter_context(patch.object(owner, name, new))
        yield stack.enter_context(Pretended())
