"""Rollouts one after another, in their order, in a thread beside the update."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal

from torch import Tensor, nn

from grpo.extras.ahead.clock import Clocked, IdleClock
from grpo.extras.ahead.copies import copy_of, holding, on_host, trained_of
from grpo.extras.ahead.order import staleness_of
from grpo.extras.ahead.streams import Playing
from grpo.rollout.engine_queue import where
from grpo.rollout.rollouts import Rollout, Rollouts
from grpo.system.distributed import in_play, is_sharded
from grpo.system.errors import RolloutError, UserError
from grpo.system.seeds import states_of
from grpo.system.stopping.stop import Stop
from grpo.system.threads import Background
from grpo.training.plain import Tensors, to_plain

log = logging.getLogger(__name__)

Handover = Literal["between rollouts", "copies", "in flight"]  # how the engine gets new weights
LOOK = 1.0  # seconds between two looks at the thread
STOPPING = 15.0  # seconds that a stopped run waits for the rollout in play, which the checkpoint then keeps


class Chain:
    """Plays the rollouts of `rollouts` in one thread. halt: whether to end.

    exact: with order=exact rollout R has the weights of version max(0, R - ahead), whatever the machine does. With order=ready it
    has the newest ones, and nothing is kept for a checkpoint.

    handover: how the engine gets weights.
        between rollouts  ahead=1: the trainer's thread gives them, and copies the trained ones to the host.
        copies            ahead>1: each version is copied on the policy's device, and the thread that plays takes the copy: up to
                          `ahead` + 1 copies of the trained weights. A copy is kept until its last rollout is finished, for the
                          checkpoint of a run that ends before.
        in flight         order=ready, if the engine takes them while it samples: the trainer's thread gives them at once.

    policy: set when the run begins.
    """

    policy: nn.Module | None = None
    mixes = False

    def __init__(self, rollouts: Rollouts, halt: Stop) -> None:
        self.plan, self.clock, self.objects, self.halt = rollouts.plan, IdleClock(), rollouts.objects, halt
        self.rollouts = rollouts
        self.engine, self.playing = rollouts.engine, Playing(rollouts.engine)
        self.exact = self.plan.order == "exact"
        self.handover: Handover = "between rollouts" if self.plan.ahead == 1 else "copies"
        if not self.exact and getattr(self.engine, "in_flight", False):
            self.handover = "in flight"
        self.copies: dict[int, nn.Module] = {}  # by version
        # by version: of a checkpoint, or with ahead=1 of the rollout in play
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.version = 0  # of the policy
        self.taken: Rollout | None = None  # handed over, and not learned from
        self.finished: dict[int, Rollout] = {}  # not handed over
        self.issued = self.next = 0  # rollouts below `issued` may be played; `next` is the first that is not finished
        self.begun, self.first = False, 0  # the first version of this process
        self.before: dict[str, Any] | None = None  # the states of the objects before the rollout in play
        self.worker: Background | None = None
        self.stopped = False
        self.progress = time.monotonic()  # when the latest group was finished
        self.changed = threading.Condition()

    # -- for the trainer's thread

    def begin(self, policy: nn.Module) -> None:
        """Know the policy. Raises UserError for a sharded one that would have to be copied."""
        self.policy = policy
        if self.handover == "copies" and is_sharded(policy):
            line = f"rollout.ahead={self.plan.ahead} order={self.plan.order} copies the weights of each version"
            raise UserError(
                f"{line}, and a sharded policy cannot be copied: set rollout.ahead=1, or order=ready with engine=vllm_server"
            )
        self.playing.begin()

    def make(self, r: int, sync: Callable[[], None]) -> Rollout:
        """Return rollout r, and let those up to r + ahead be played. sync: gives the engine the policy's weights."""
        if not self.begun or r >= self.issued:
            self.issued, self.next, self.version = max(self.issued, r), max(self.next, r), r
            with self.halt.allowed():
                self._begin(r, sync)
            self.begun = True
        between = self.handover == "between rollouts"
        self._issue(r + 1 if between else r + self.plan.ahead + 1)
        with self.halt.allowed():  # and not below, where the rollout is in nobody's hands
            self._wait(lambda: r in self.finished)
        self.taken = rollout = self.finished.pop(r)
        if between and r + 1 < self.plan.num_rollouts:
            with self.clock.waits():
                sync()
            self._keep(r)
            self._issue(r + 2)
        return rollout

    def learned(self, version: int, policy: nn.Module, sync: Callable[[], None]) -> None:
        """Take the weights after an update: give them to an engine that takes them in flight, or keep a copy."""
        self.version, self.taken = version, None
        if self.handover == "in flight" and version < self.plan.num_rollouts:
            with self.clock.waits():
                sync()
        first = version + (self.plan.ahead if self.exact else 0)  # rollout that may have them
        if self.handover == "copies" and first < self.plan.num_rollouts:
            with self.changed:
                if not self.exact:
                    self.copies.clear()
                self.copies[version] = self.playing.noted(copy_of(policy))
                self.changed.notify_all()

    @property
    def flying(self) -> int:
        """The number of groups that are being played."""
        return (self.issued - self.next) * self.plan.prompts

    def facts(self, rollout: Rollout, update: int) -> dict[str, float]:
        """Return the metrics of a handover."""
        return {
            **staleness_of(rollout, update),
            "rollout/buffered_groups": float(sum(len(each.groups) for each in self.finished.values())),
            "rollout/flying_groups": float(self.flying),
            "time/played": rollout.seconds,
            **self.clock.read(),
        }

    def settle(self) -> None:
        """Wait until no rollout is in play: for an evaluation, or a checkpoint. A failure is raised by `make`."""
        self._wait(lambda: self.next >= self.issued, raises=False)

    def stop(self, keeps: bool = False) -> None:
        """Stop, for good. keeps: wait for the rollout in play, at most STOPPING seconds, so that a checkpoint has it."""
        if keeps and self.worker:
            self.issued = min(self.issued, self.next + 1)
            self._wait(lambda: self.next >= self.issued, raises=False, limit=STOPPING)
        if worker := self.worker:  # the thread may set it to None meanwhile
            worker.stop()
        self.stopped = True

    def state_dict(self) -> dict[str, Any]:
        """Return the finished rollouts for a checkpoint. The others are played again, with the same seeds, and with order=exact
        with the same weights."""
        if not self.stopped:
            self.settle()
        finished = [*([self.taken] if self.taken else []), *(self.finished[r] for r in sorted(self.finished))]
        try:
            to_plain(finished, Tensors(), "rollout")  # whether a file can hold it
        except TypeError as error:
            log.warning("the checkpoint has no rollout ahead, it is played again: %s", error)
            finished = []
        places = [places_of(rollout) for rollout in finished]
        of = {"plan": self.plan, "recipe": self.rollouts.recipe}
        state = {**of, "finished": finished, "places": places, "weights": self._older(len(finished))}
        return {"ahead": state} | ({"objects": self.before} if self.before is not None else {})

    def load_state_dict(self, state: dict[str, Any], learned: int) -> None:
        """Take the finished rollouts from a checkpoint after `learned` rollouts, if they were made with the same plan."""
        kept = state.get("ahead") or {}
        if "finished" in kept and same_samples(kept, self.rollouts):
            both = zip(kept["finished"], kept["places"], strict=True)
            self.finished = {r: linked(*pair) for r, pair in enumerate(both, learned)}
            self.issued = self.next = learned + len(self.finished)
            self.weights = {version: weights for version, weights in kept.get("weights", []) if self.exact}
            self.version, self.first = learned, min([learned, *self.weights])

    def _begin(self, r: int, sync: Callable[[], None]) -> None:
        """Give the engine the weights of the first rollout of this process that is played, and keep those of all that follow."""
        older, self.first = sorted(self.weights), min([r, *self.weights])
        if not self.exact or self.policy is None:
            return sync()
        if self.handover == "copies":
            self.copies = {version: copy_of(self.policy, self.weights[version]) for version in older}
            self.copies[r], self.weights = self.playing.noted(copy_of(self.policy)), {}
        elif self.next == r and r - 1 in older:
            with holding(self.policy, self.weights[r - 1]):
                return self.engine.load_weights(self.policy, r - 1)
        else:
            self._keep(r)
        sync()

    def _keep(self, version: int) -> None:
        """Copy the trained weights, which the engine has got, to the host, if they are whole on this device."""
        if self.policy is not None and not is_sharded(self.policy):
            self.weights = {version: on_host(self.policy)}

    def _older(self, finished: int) -> list[tuple[int, dict[str, Tensor]]]:
        """Return the weights, older than the policy's, of rollouts that follow the `finished` ones: (version, weights) each."""
        last = min(self.version + self.plan.ahead, self.plan.num_rollouts)
        versions = {max(self.first, r - self.plan.ahead) for r in range(self.version + finished, last)}
        versions = sorted(version for version in versions if self.exact and version < self.version)
        kept = {version: trained_of(copy) for version, copy in self.copies.items()} | self.weights
        if lost := [version for version in versions if version not in kept]:
            log.warning(
                "the checkpoint lacks the weights of version %d: a resumed run is not as without a stop", lost[0]
            )
        return [(version, kept[version]) for version in versions if version in kept]

    # -- the thread

    def _issue(self, count: int) -> None:
        with self.changed:
            self.issued = max(self.issued, min(count, self.plan.num_rollouts))
            if failure := failed(self.worker):
                raise failure
            if self.next < self.issued and self.worker is None:
                self.progress = time.monotonic()
                self.worker = Background(partial(self.playing.run, self._play))

    def _play(self) -> None:
        eager = not self.exact and getattr(self.engine, "concurrent", False)
        engine = Clocked(self.engine, self.clock, eager)
        while self.next < self.issued:
            play = self.rollouts.play  # a teacher may have put itself round it
            if "finished" in signature(play).parameters:
                play = partial(play, finished=self._note)
            mine = replace(self.rollouts, engine=engine, play=play)
            if self.handover == "copies":
                self._take(self.next)
            self.before = states_of(self.objects)
            rollout = mine.make(self.next)
            with self.changed:
                self.finished[self.next] = rollout
                self.before = None
                self.next += 1
                self.changed.notify_all()
                if self.next >= self.issued:  # while no other thread can issue more
                    self.worker = None
                    return

    def _note(self, *_: Any) -> None:
        self.progress = time.monotonic()

    def _take(self, r: int) -> None:
        """Give the engine the weights of rollout r, once they are there."""
        wanted = max(self.first, r - self.plan.ahead)
        with self.clock.waits():
            with self.changed:
                if not self.exact:
                    wanted = max(self.copies, default=self.engine.version)
                while self.engine.version != wanted and wanted not in self.copies:
                    self.changed.wait(LOOK)  # in steps, since this thread may be asked to end
                copy = self.copies.get(wanted)
            if copy is not None and self.engine.version != wanted:
                with in_play():
                    self.playing.follow()
                    self.engine.load_weights(copy, wanted)
        with self.changed:
            kept = wanted if self.exact else wanted + 1
            self.copies = {version: copy for version, copy in self.copies.items() if version >= kept}

    def _wait(self, reached: Callable[[], bool], raises: bool = True, limit: float | None = None) -> None:
        """Wait, in steps that a signal interrupts. Raises the thread's failure, or RolloutError after `plan.patience` seconds."""
        begun = time.monotonic()
        while not reached():
            with self.changed:
                worker = self.worker
                self.changed.wait_for(lambda: reached() or failed(self.worker), LOOK)
            if failure := not reached() and failed(worker):
                if raises:
                    raise failure
                return
            if limit is None and not raises and self.halt.why:  # a checkpoint or an evaluation of a run that should end
                begun, limit = time.monotonic(), STOPPING
            if limit is not None and time.monotonic() - begun > limit:
                log.warning("rollout %d was not finished in %g s: it is played again", self.next + 1, limit)
                return
            if time.monotonic() - max(begun, self.progress) > self.plan.patience:
                if not raises:
                    return
                raise RolloutError(waited(self.plan.patience, f"rollout {self.next + 1}"))


def places_of(rollout: Rollout) -> list[list[list[int] | None]]:
    """Return where in `played` the episode of each sample of `groups` is; None for one that an earlier rollout has played."""
    places = {id(s.trajectory): [i, j] for i, group in enumerate(rollout.played) for j, s in enumerate(group)}
    return [[places.get(id(sample.trajectory)) for sample in group] for group in rollout.groups]


def linked(rollout: Rollout, places: list[list[list[int] | None]]) -> Rollout:
    """Return a rollout that was read from a file, with one object for each episode in `groups` and `played`, as it was made."""
    groups = [
        [
            replace(sample, trajectory=rollout.played[place[0]][place[1]].trajectory) if place else sample
            for sample, place in zip(group, of_group, strict=True)
        ]
        for group, of_group in zip(rollout.groups, places, strict=True)
    ]
    return replace(rollout, groups=groups)


def failed(worker: Background | None) -> BaseException | None:
    """Return the exception that ended a thread, if one did."""
    return worker.failure if worker else None


def waited(seconds: float, what: str) -> str:
    """Return a line about a wait that was too long, with what the open episodes wait for."""
    line = f"no group was finished for rollout.patience={seconds:g} s: the policy waits for {what}"
    return f"{line} ({where()}); resume=auto continues the run"


def same_samples(saved: Mapping[str, Any], rollouts: Rollouts) -> bool:
    """Return whether rollouts of a checkpoint were made as those of this run; else a warning says that they are not used. The
    length of the run, and how far it plays ahead, may differ."""
    ours = rollouts.plan
    names = ("num_rollouts", "epochs", "ahead", "order", "max_staleness", "stale", "patience")
    free = {name: getattr(ours, name) for name in names}
    same = replace(saved["plan"], **free) == ours and saved.get("recipe", rollouts.recipe) == rollouts.recipe
    if not same:
        log.warning("the rollouts ahead of the checkpoint were made with other settings: they are played again")
    return same
