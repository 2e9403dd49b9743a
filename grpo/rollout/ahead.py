"""A rollout ahead of the update: it is played in a thread, by the weights of before, while the policy learns."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from grpo.objectives.batch import Scores
from grpo.rollout.types import Group

GRACE = 5.0  # seconds


@dataclass(frozen=True)
class Played:
    """All groups that were sampled for a rollout, and what they earned; in how many rounds; the version of the weights that the
    engine held when it began; the seconds it took."""

    groups: list[Group]
    scores: Scores
    rounds: int
    version: int
    seconds: float

    def staleness(self, rollouts: int) -> float:
        """Versions between the weights that drew a token and those that learn from it, `rollouts`; the mean over all tokens."""
        completions = [turn.completion for group in self.groups for sample in group for turn in sample.turns]
        drawn = [c.versions or (self.version,) * len(c.ids) for c in completions]
        return sum(rollouts * len(versions) - sum(versions) for versions in drawn) / max(1, sum(map(len, drawn)))


class Ahead:
    """play: called at once, in a thread that does not keep the program from ending."""

    def __init__(self, play: Callable[[], Played]) -> None:
        self.future: Future[Played] = Future()
        self.thread = threading.Thread(target=self._run, args=(play,), name="rollout", daemon=True)
        self.thread.start()

    def _run(self, play: Callable[[], Played]) -> None:
        try:
            self.future.set_result(play())
        except BaseException as error:  # for whoever waits
            self.future.set_exception(error)

    def result(self) -> Played:
        """Waits. Raises what `play` raised."""
        return self.future.result()

    def wait(self) -> Played | None:
        """The same, and None where it failed."""
        return None if self.future.exception() else self.future.result()

    def stop(self) -> None:
        """Nobody wants it any more. A thread that is in torch's code when Python ends would abort the program, so it is ended;
        one that does not listen, because it waits for a server, is left behind."""
        # in Python 3.11 a thread that this one is just starting may be hit instead; then this one waits for it, and is left too
        if self.thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit))
            self.thread.join(GRACE)
