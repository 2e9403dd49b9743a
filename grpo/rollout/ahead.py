"""Rollouts one step ahead: a thread plays the next rollout, with the weights before the update, while the policy learns."""

import ctypes
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from grpo.engines.protocol import Engine
from grpo.rollout.plain import Tensors, to_plain
from grpo.rollout.rollouts import Rollout, Rollouts
from grpo.system.errors import UserError

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds to wait for a thread that is asked to end


class Ahead:
    """Makes the rollouts of `rollouts`, each one while the policy learns from the one before."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.plan = rollouts, rollouts.plan
        self.next: Background | None = None

    def make(self, r: int, sync: Callable[[], None]) -> Rollout:
        """Return rollout r and start the next. sync: gives the engine the policy's weights; called while no rollout is played."""
        if self.next is None:
            sync()
        rollout = self.next.future.result() if self.next else self.rollouts.make(r)
        self.next = None  # only now: if the wait is interrupted, `stop` must find the thread
        if r + 1 < self.plan.num_rollouts:
            sync()
            self.next = Background(partial(self.rollouts.make, r + 1))
        return rollout

    def wait(self) -> Rollout | None:
        """Wait for the rollout that is being played, and return it; None if there is none, or if it failed."""
        return self.next.future.result() if self.next and not self.next.future.exception() else None

    def stop(self) -> None:
        """Stop the rollout that is being played."""
        if self.next:
            self.next.stop()

    def state_dict(self) -> dict:
        """Return the next rollout, once it is played, for a checkpoint."""
        rollout = self.wait()
        if rollout is None:
            return {}
        try:
            to_plain(rollout, Tensors(), "rollout")  # whether a file can hold it
            return {"ahead": (self.plan, rollout)}
        except TypeError as error:
            log.warning("the checkpoint has no rollout ahead, it is played again with newer weights: %s", error)
            return {}

    def load_state_dict(self, state: dict) -> None:
        """Take the next rollout from a checkpoint, if it was made with the same plan."""
        plan, rollout = state.get("ahead", (None, None))
        if plan and replace(plan, num_rollouts=self.plan.num_rollouts) == self.plan:  # otherwise it is played again
            self.next = Background(lambda: rollout)


class Background:
    """A call in a daemon thread, which does not keep the program from ending. The thread uses this thread's GPU."""

    def __init__(self, make: Callable[[], Rollout]) -> None:
        self.future: Future[Rollout] = Future()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = threading.Thread(target=self._run, args=(make,), name="rollout", daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[], Rollout]) -> None:
        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)  # a new thread has GPU 0
            self.future.set_result(make())
        except BaseException as error:  # raised again for the caller who waits
            self.future.set_exception(error)

    def stop(self) -> None:
        """End the thread, because one that runs torch's code when Python ends would abort the program. A thread that does not
        react, because it waits for a server, is abandoned after GRACE seconds."""
        # in Python 3.11 a thread that this one is just starting may get the exception instead; then this one is abandoned too
        if self.thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit))
            self.thread.join(GRACE)


def check_engine(engine: Engine, ahead: int) -> None:
    """Raise UserError if rollout.ahead=1 is set and the engine has no weights of its own."""
    if ahead and not getattr(engine, "apart", False):
        line = "rollout.ahead=1 needs an engine with its own copy of the weights: set engine=vllm or engine=vllm_server"
        raise UserError(f"{line}; the built-in one and vllm_shared sample from the weights that the update changes")
