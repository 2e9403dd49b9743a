"""The stream of CUDA on which an engine in this process computes beside the update.

The streams of a GPU run side by side, and events alone order them. A new thread computes on the default stream, as the trainer
does, so without a stream of its own an engine waits for all that the update has queued. With one there are three orders:

    the copy of a version before its load      an event behind the copy, for which the thread that plays waits (here)
    the trainer's weights before their load    the engine's stream waits for that of the thread that loads (`Turns.between_steps`)
    the load before the update changes them    the thread that loads waits until all is copied (`VLLMEngine`)

All steps of an engine are on one stream, whichever thread asks for them: a step reads the tokens of the one before.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

FIRST = -1  # a priority: the short kernels of a step go before those of the update


class Playing:
    """Where rollouts of an engine are computed. Without a GPU, and for an engine elsewhere, it changes nothing."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.stream: torch.cuda.Stream | None = None
        self.copied: torch.cuda.Event | None = None  # behind the newest copy of the weights

    def begin(self) -> None:
        """Give the engine its stream, from the trainer's thread."""
        if torch.cuda.is_initialized() and hasattr(self.engine, "play_on"):
            self.stream = torch.cuda.Stream(priority=FIRST)
            self.stream.wait_stream(torch.cuda.current_stream())  # it may hold weights already
            self.engine.play_on(self.stream)

    def run(self, play: Callable[[], None]) -> None:
        """Call `play` with the engine's stream as that of this thread."""
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            play()

    def noted(self, copy: nn.Module) -> nn.Module:
        """Return a copy of the weights that this thread has just queued, behind which there is an event now."""
        if self.stream:
            self.copied = torch.cuda.current_stream().record_event()
        return copy

    def follow(self) -> None:
        """Let what this thread queues next wait until the copies are made."""
        if self.copied:
            torch.cuda.current_stream().wait_event(self.copied)
