"""The groups of several rollouts at once: an update takes those that are finished, whichever rollout they belong to."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from grpo.env.types import Example
from grpo.extras.ahead.chain import LOOK, same_samples, waited
from grpo.extras.ahead.clock import Clocked, IdleClock
from grpo.extras.ahead.order import Key, Waiting, for_update, staleness_of
from grpo.extras.ahead.streams import Playing
from grpo.rollout.collate import scores
from grpo.rollout.rollouts import Rollout, Rollouts
from grpo.rollout.samples_table import saving_failures
from grpo.rollout.types import Group
from grpo.rollout.versions import versions_of
from grpo.system import distributed
from grpo.system.errors import RewardError, RolloutError, StopError, UserError, error_line
from grpo.system.progress import set_progress
from grpo.system.stopping.stop import Stop
from grpo.system.threads import Background, stop_all
from grpo.training.plain import Tensors, to_plain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A group that was issued. begun: the version at that time; tries: how often it was sampled before."""

    key: Key
    example: Example
    begun: int
    tries: int = 0


class Pool:
    """Plays the groups of rollouts, each rollout in a thread of its own. An update takes the oldest finished groups.

    stale: what becomes of a group with a token older than `plan.most_stale` versions. wait: the update waits, so
    that no group gets too old. drop: it is sampled again, once; then the update waits for it. correct: it is learned from.
    Every group of the plan is learned from once. On several ranks each plays its share; the finished groups are exchanged when
    an update needs them, and by the trainer's thread alone, so that all ranks choose the same ones. stop: whether to end.
    """

    mixes = True

    def __init__(self, rollouts: Rollouts, stop: Stop) -> None:
        self.rollouts, self.plan, self.engine, self.stopped = rollouts, rollouts.plan, rollouts.engine, stop
        self.clock, self.playing = IdleClock(), Playing(rollouts.engine)
        self.issued = 0  # rollouts below it were issued
        self.flights: dict[Key, Flight] = {}  # issued and not handed over
        self.taken: dict[Key, tuple[Flight, tuple[Group, float]]] = {}  # handed over, and not learned from
        self.finished: dict[Key, tuple[Group, float]] = {}  # of these, with the seconds that they took
        self.new: list[tuple[Key, Group, float]] = []  # finished here, and not yet exchanged
        self.workers: list[Background] = []
        self.begun, self.again, self.stale = False, 0, 0
        self.changed = threading.Condition()

    def begin(self, policy: nn.Module) -> None:
        """Give the engine its stream; it takes the weights in flight."""
        self.playing.begin()

    def make(self, r: int, sync: Callable[[], None]) -> Rollout:
        """Return the groups for update r, and issue those of the rollouts up to r + ahead."""
        set_progress(r, self.plan.num_rollouts)
        if not self.begun:
            with self.stopped.allowed():
                sync()
            self.issued, self.begun = max(self.issued, r), True
            self._launch([flight for key, flight in self.flights.items() if key not in self.finished])
        self._issue(r)
        if not self.flights:
            raise RolloutError(f"no prompt is left for rollout {r + 1}: lower rollout.num_rollouts")
        self.again, since, count = 0, time.monotonic(), len(self.finished)
        while True:
            self._exchange(overdue=time.monotonic() - since > self.plan.patience)
            self._resample(r)
            if (keys := for_update(self._waiting(), r, self.plan.prompts)) is not None:
                return self._handed(keys, r)
            if len(self.finished) != count:
                since, count = time.monotonic(), len(self.finished)
            with self.stopped.allowed(), self.changed:  # not where groups are in nobody's hands
                self.changed.wait_for(lambda: self.new or any(worker.failure for worker in self.workers), LOOK)

    def learned(self, version: int, policy: nn.Module, sync: Callable[[], None]) -> None:
        """Give the engine the weights after an update; completions under way take them up."""
        self.taken = {}
        if version < self.plan.num_rollouts:
            with self.clock.waits() if self.flying else nullcontext():
                sync()

    @property
    def flying(self) -> int:
        """The number of groups that are being played."""
        return len(self.flights) - len(self.finished)

    def facts(self, rollout: Rollout, update: int) -> dict[str, float]:
        """Return the metrics of a handover."""
        return {
            **staleness_of(rollout, update),
            "rollout/buffered_groups": float(len(self.finished)),
            "rollout/flying_groups": float(self.flying),
            "rollout/resampled_groups": float(self.again),
            "rollout/stale_groups": float(self.stale),
            "time/played": rollout.seconds,
            **self.clock.read(),
        }

    def settle(self) -> None:
        """Do nothing: an evaluation and a checkpoint need not wait for groups in flight."""

    def stop(self, keeps: bool = False) -> None:
        """Stop all threads. The groups in flight are issued again by a resumed run."""
        stop_all(self.workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the finished groups, and the keys of those that are to be issued again, for a checkpoint."""
        self._exchange(raises=False)
        made = self.taken | {key: (self.flights[key], made) for key, made in self.finished.items()}
        finished = [[*key, flight.begun, flight.tries, *group] for key, (flight, group) in made.items()]
        try:
            to_plain(finished, Tensors(), "rollout")
        except TypeError as error:
            log.warning("the checkpoint has no samples ahead, they are sampled again with newer weights: %s", error)
            finished = []
        kept = {(r, place) for r, place, *_ in finished}
        flights = [*self.flights.values(), *(flight for flight, _ in self.taken.values())]
        flying = [[*f.key, f.tries] for f in flights if f.key not in kept]
        of = {"plan": self.plan, "recipe": self.rollouts.recipe}
        return {"ahead": {**of, "issued": self.issued, "finished": finished, "flying": flying}}

    def load_state_dict(self, state: dict[str, Any], learned: int) -> None:
        """Take the groups from a checkpoint after `learned` rollouts, if they were made with the same plan."""
        kept = state.get("ahead") or {}
        if "flying" not in kept:
            return
        if kept["plan"].prompts != self.plan.prompts:  # the prompts of a rollout are others
            log.warning("rollout.prompts has changed: prompts in flight are left out, and rollouts begin anew")
            return
        self.issued, again = kept["issued"], [*kept["flying"]]
        if same_samples(kept, self.rollouts):
            for r, place, begun, tries, group, seconds in kept["finished"]:
                self.flights[r, place] = Flight((r, place), group[0].example, begun, tries)
                self.finished[r, place] = group, seconds
        else:
            again += [[r, place, tries] for r, place, _, tries, *_ in kept["finished"]]
        for r, place, tries in again:  # the sampler has no state, or `check` would have refused it
            example = self.rollouts.sampler.draw(r, self.plan.prompts, 0)[place]
            self.flights[r, place] = Flight((r, place), example, learned, tries)

    # -- what is in flight

    def _issue(self, r: int) -> None:
        """Issue the rollouts up to r + ahead."""
        while self.issued < min(r + self.plan.ahead + 1, self.plan.num_rollouts):
            set_progress(self.issued, self.plan.num_rollouts)
            examples = self.rollouts.sampler.draw(self.issued, self.plan.prompts, 0)
            self._launch([Flight((self.issued, place), example, r) for place, example in enumerate(examples)])
            self.issued += 1

    def _launch(self, flights: Iterable[Flight]) -> None:
        """Play groups, those of each rollout in a thread; here this rank's share of them."""
        by_rollout: dict[int, list[Flight]] = defaultdict(list)
        for flight in flights:
            self.flights[flight.key] = flight
            by_rollout[flight.key[0]].append(flight)
        for group in by_rollout.values():
            if mine := [group[i] for i in distributed.share(len(group))]:
                self.workers.append(Background(partial(self.playing.run, partial(self._play, mine))))

    def _play(self, flights: list[Flight]) -> None:
        """Play the groups of one rollout."""
        begun, (r, first) = time.perf_counter(), flights[0].key

        def finished(i: int, group: Group) -> None:
            with self.changed:
                self.new.append((flights[i].key, group, time.perf_counter() - begun))
                self.changed.notify_all()

        engine, play = Clocked(self.engine, self.clock, eager=True), partial(self.rollouts.play, finished=finished)
        failed = Path(self.rollouts.folder, "rollouts", f"{r + 1:06d}.{first}.failed.parquet")
        with distributed.by_itself(), self.rollouts.while_sampling(), saving_failures(failed):
            examples, places = [flight.example for flight in flights], [flight.key[1] for flight in flights]
            mine = replace(self.rollouts, engine=engine, play=play)
            try:
                mine.one_round(r, examples, places, self.plan.group_size)
            except RewardError:
                raise
            except RolloutError as error:
                # all environments of these few groups failed: `_handed` judges those of a whole update
                log.debug("%s", error)

    def _exchange(self, raises: bool = True, overdue: bool = False) -> None:
        """Take the groups that all ranks have finished. Raises the failure of a thread, StopError, or RolloutError if nothing was
        finished for too long, on all ranks. overdue: whether that is so on this one."""
        with self.changed:
            new, self.new = self.new, []
        failures = [worker.failure for worker in self.workers if worker.failure]
        self.workers = [worker for worker in self.workers if not worker.future.done() or worker.failure]
        saves, line = bool(failures) and isinstance(failures[0], RolloutError), None
        if failures:
            line = str(failures[0]) if saves else error_line(failures[0])
        elif overdue and not new:
            line, saves = waited(self.plan.patience, self._missing()), True
        with distributed.in_play():
            gathered = distributed.all_gather(
                [(new, line, saves, self.stopped.why if distributed.world_size() > 1 else None)]
            )
        for news, *_ in gathered:
            self.finished |= {key: (group, seconds) for key, group, seconds in news}
        if not raises:
            return
        if failures:
            raise failures[0]
        for _, line, saves, why in gathered:
            if line:  # a checkpoint is written by all ranks, or by none
                raise RolloutError(line) if saves else UserError(f"another rank: {line}")
            if why:
                raise StopError(why)

    def _missing(self) -> str:
        missing = [key for key in self.flights if key not in self.finished]
        return f"{len(missing)} groups, the first is prompt {missing[0][1]} of rollout {missing[0][0] + 1}"

    # -- what is handed over

    def _waiting(self) -> list[Waiting]:
        """Return the groups that were not learned from, with their deadlines."""
        due = {"wait": 0, "drop": 1, "correct": 1 << 30}[self.plan.stale]  # tries from which the update waits

        def deadline(flight: Flight) -> int | None:
            return flight.begun + self.plan.most_stale if flight.tries >= due else None

        return [Waiting(f.key, f.key in self.finished, deadline(f)) for f in self.flights.values()]

    def _resample(self, r: int) -> None:
        """Issue again the groups that are too old for update r, if they are to be dropped."""
        if self.plan.stale != "drop":
            return
        old = [
            key for key, (group, _) in self.finished.items() if self._is_stale(group, r) and not self.flights[key].tries
        ]
        for key in old:
            del self.finished[key]
        self.again += len(old)
        self._launch([replace(self.flights[key], begun=r, tries=1) for key in old])

    def _is_stale(self, group: Group, r: int) -> bool:
        return r - min(versions_of(group, r), default=r) > self.plan.most_stale

    def _handed(self, keys: list[Key], r: int) -> Rollout:
        """Return the groups of these keys as the rollout of update r. Raises RolloutError if all environments failed."""
        groups, seconds = zip(*(self.finished[key] for key in keys), strict=True)
        trajectories = [sample.trajectory for group in groups for sample in group]
        if all(trajectory.failed for trajectory in trajectories):
            ended = f"the environment failed in all {len(trajectories)} episodes"
            raise RolloutError(f"{ended}; the first: {trajectories[0].error}; fix it, or raise step_timeout", groups)
        self.stale = sum(self._is_stale(group, r) for group in groups)
        scored = self.rollouts.algorithm.shaped(scores(groups))
        self.taken = {key: (self.flights.pop(key), self.finished.pop(key)) for key in keys}
        return Rollout([*groups], scored, [*groups], scored, 1, r, max(seconds))
