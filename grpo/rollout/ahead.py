"""Rollouts one step ahead: the next one is played in a thread, by the weights of before, while the policy learns."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from grpo.rollout.rollouts import Rollout, Rollouts

GRACE = 5.0  # seconds
Played = Rollout  # its name in checkpoints made before


class Ahead:
    """Makes the same rollouts as `rollouts`; while the policy learns from one, the next is being played."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts, self.plan = rollouts, rollouts.plan
        self.next: Background | None = None

    def make(self, r: int, sync: Callable[[], None]) -> Rollout:
        """sync: gives the engine the policy's weights. It is called when no rollout is being played."""
        if self.next is None:
            sync()
        rollout = self.next.future.result() if self.next else self.rollouts.make(r)
        self.next = None  # not before: who interrupts the wait must find the thread
        if r + 1 < self.plan.num_rollouts:
            sync()
            self.next = Background(partial(self.rollouts.make, r + 1))
        return rollout

    def wait(self) -> Rollout | None:
        """The rollout that is being played, when it is done; None where there is none, or it failed."""
        return self.next.future.result() if self.next and not self.next.future.exception() else None

    def stop(self) -> None:
        if self.next:
            self.next.stop()

    def state_dict(self) -> dict:
        rollout = self.wait()
        return {"ahead": (self.plan, rollout)} if rollout else {}

    def load_state_dict(self, state: dict) -> None:
        plan, rollout = state.get("ahead", (None, None))
        if plan and replace(plan, num_rollouts=self.plan.num_rollouts) == self.plan:  # else it is played anew
            self.next = Background(lambda: rollout)


class Background:
    """A call in a thread that does not keep the program from ending."""

    def __init__(self, make: Callable[[], Rollout]) -> None:
        self.future: Future[Rollout] = Future()
        self.thread = threading.Thread(target=self._run, args=(make,), name="rollout", daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[], Rollout]) -> None:
        try:
            self.future.set_result(make())
        except BaseException as error:  # for whoever waits
            self.future.set_exception(error)

    def stop(self) -> None:
        """Nobody wants it any more. A thread that is in torch's code when Python ends would abort the program, so it is ended;
        one that does not listen, because it waits for a server, is left behind."""
        # in Python 3.11 a thread that this one is just starting may be hit instead; then this one waits for it, and is left too
        if self.thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit))
            self.thread.join(GRACE)
