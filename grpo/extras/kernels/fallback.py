"""A kernel that fails in the middle of a run: another computation takes its place in the rest of it.

In a forward pass the other computation follows at once. A backward pass needs what its forward pass has kept, so an error there
ends the attempt, and the gradients of the whole update are made again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, TypeVar

import torch

from grpo.models.compiled import reason_of
from grpo.system import distributed
from grpo.system.errors import UserError, lacks_memory
from grpo.training.optimization import TokensAtOnce

T = TypeVar("T")
log = logging.getLogger(__name__)


class Replaceable:
    """A kernel that a run can do without.

    name: in the log. instead: what computes in its place, and what that costs. without: the setting of a run that does not use
    it. code: parts of the paths of its files, by which its errors are known.
    Mutable: failed, why it is no longer used in this process; empty as long as it works.
    """

    name = instead = without = ""
    code: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.failed = ""

    def raised(self, error: BaseException) -> bool:
        """Return whether an error comes from its code, and is neither a lack of memory nor a line for the user."""
        if isinstance(error, UserError | torch.OutOfMemoryError) or lacks_memory(error):
            return False
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        return any(part in file for file in files for part in self.code)

    def fail(self, error: BaseException) -> None:
        """Use it no more in this process, and warn."""
        self.failed = reason_of(error)
        log.warning("%s failed (%s): %s", self.name, self.failed, self.instead)

    def tried(self, compare: Callable[..., str], *arguments: Any) -> str:
        """Return compare(*arguments), or why this kernel failed meanwhile."""
        try:
            return compare(*arguments)
        except Exception as error:
            if not self.raised(error):
                raise
            self.fail(error)
            return self.failed


@dataclass
class WithoutKernels(TokensAtOnce):
    """The limit of a run whose kernels may fail in an update. kernels: those that it uses. made: called after each update."""

    kernels: tuple[Replaceable, ...] = ()
    made: Callable[[], None] = field(default=lambda: None, compare=False)

    def fitting(self, gradients: Callable[[], T], zero_grad: Callable[[], None], longest: int) -> T:
        """Return what TokensAtOnce does. If a kernel fails, drop what the attempt added, and make it again without the kernel.

        Raises UserError with several devices, since the others have gone on, and wait for this one's gradient.
        """
        while True:
            used = [each for each in self.kernels if not each.failed]
            try:
                result = super().fitting(gradients, zero_grad, longest)
            except Exception as error:
                kernel = next((each for each in used if each.raised(error)), None)
                if kernel is None:
                    raise
                if not kernel.failed:  # else the forward pass has said so
                    kernel.fail(error)
                if distributed.world_size() > 1:
                    line = (
                        f"{kernel.name} failed in an update, which several devices make together ({reason_of(error)})"
                    )
                    raise UserError(f"{line}: set {kernel.without}, and resume the run") from error
            else:
                self.made()
                return result
            zero_grad()
            torch.cuda.empty_cache()
