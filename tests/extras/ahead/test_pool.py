"""rollout.order=ready: the groups of several rollouts at once, each learned from once; and rollout.ahead beyond 1."""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import lightning as L
import pandas as pd
import pytest
from helpers.runs import learned
from helpers.slots import Halves, Talk

from grpo.data.prompts import Uniform
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Reward, Trajectory
from grpo.extras.ahead.check import one_by_one
from grpo.extras.ahead.pool import Flight, Pool
from grpo.extras.selection.selection import Dynamic
from grpo.rollout.draw import Everything
from grpo.rollout.episodes import play
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group, Plan, Sample
from grpo.runs.run import Run
from grpo.system.errors import RolloutError, UserError
from grpo.system.seeds import TRAIN, derive_seed
from grpo.system.stopping.stop import Stop

HALVES = {"_target_": "helpers.slots.Halves"}  # 40 questions
READY = "rollout.order=ready engine._target_=helpers.slots.Streams"


@pytest.fixture
def run(smoke, tmp_path):
    """A run of 6 rollouts of 2 prompts whose samples are kept, in a folder of tmp_path. Returns its rows without those before
    training, and the samples."""

    def run(*overrides: str, folder: str = "run", task=HALVES) -> tuple[list[dict[str, float]], pd.DataFrame]:
        settings = f"""algo.old_policy=rollout eval.every=0 engine=transformers rollout.num_rollouts=6 rollout.prompts=2
            engine._target_=helpers.slots.Apart callbacks=[samples] rollout.patience=60
            output_dir={tmp_path / folder}""".split()
        words = [word for text in overrides for word in text.split()]
        (tmp_path / folder).mkdir(exist_ok=True)
        learned(smoke(*settings, *words), task)
        table = pd.read_csv(tmp_path / folder / "metrics.csv")
        return table.to_dict("records"), Run(tmp_path / folder).samples(range(1, 7))

    return run


def test_order_exact_gives_each_rollout_the_weights_of_its_number(run):
    """ahead=3: rollouts 0 to 3 are sampled by the weights before training, rollout 4 by version 1, and 5 by version 2."""
    rows, samples = run("rollout.ahead=3", folder="one")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 3, 3, 3]
    again, same = run(
        "rollout.ahead=3", "engine._target_=helpers.slots.Streams +engine.piece=100 +engine.pause=0.02", folder="two"
    )
    assert samples.completion.tolist() == same.completion.tolist()  # whatever takes longer
    assert [row["loss/policy"] for row in rows] == [row["loss/policy"] for row in again]


def test_order_ready_learns_from_every_prompt_once(run):
    rows, samples = run("rollout.ahead=2", READY)
    assert Counter(samples.groupby("prompt").size()) == {2: 12}
    for row in rows:
        assert 0 <= row["rollout/staleness"] <= row["rollout/staleness_max"] <= 4
        assert row["rollout/buffered_groups"] + row["rollout/flying_groups"] <= 4
    assert rows[-1]["rollout/buffered_groups"] + rows[-1]["rollout/flying_groups"] == 0
    assert max(row["rollout/staleness_max"] for row in rows) >= 1


class Updates(L.Callback):
    """Lets the first environment of the run wait for an update."""

    made, first = threading.Event(), threading.Lock()

    def __init__(self, update: int) -> None:
        self.update = update
        self.made.clear()
        self.first.acquire(blocking=False)

    def on_train_start(self, trainer, module) -> None:
        self.first.release()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch.rollout == self.update:
            self.made.set()


Updates.first.acquire()


class Held(Halves):
    """Two turns. Between those of one episode the environment waits until some update was made."""

    def build(self, example):
        return Between(example["number"])


class Between(Talk):
    def __init__(self, number):
        super().__init__(["go on"])
        self.messages = (Message("user", str(number)),)
        self.waits = Updates.first.acquire(blocking=False)

    async def step(self, action):
        while self.waits and not Updates.made.is_set():
            await asyncio.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize("stale", [pytest.param("drop", marks=pytest.mark.slow), "correct", "wait"])
def test_a_group_that_is_older_than_the_bound(run, stale):
    """One sample waits for the fourth update, so that its first turn is 4 versions old; the bound is 2."""
    settings = f"rollout.ahead=1 max_turns=2 {READY} rollout.stale={stale}"
    update = 1 if stale == "wait" else 3
    more = f"+callbacks.updates={{_target_: test_pool.Updates, update: {update}}}"
    rows, samples = run(settings, more.replace(" ", ""), task={"_target_": "test_pool.Held"})
    resampled, late = (sum(row[f"rollout/{name}_groups"] for row in rows) for name in ("resampled", "stale"))
    oldest = max(row["rollout/staleness_max"] for row in rows)
    assert Counter(samples.groupby("example").size()) == {2: 12}
    assert (resampled, late) == {"drop": (1, 0), "correct": (0, 1), "wait": (0, 0)}[stale]
    assert oldest >= 4 if stale == "correct" else oldest <= 2


def test_a_wait_names_whom_it_waits_for(run, monkeypatch):
    """With stale=wait the update waits for a group that is due. Its environment never answers, so the run ends. The second of
    patience passes only while that group alone is missing."""
    pools, made, passed = [], Pool.make, [0.0]

    def make(pool, *arguments):
        pools.append(pool)
        return made(pool, *arguments)

    def clock() -> float:
        passed[0] += 0.6 * (pools[-1].flying == 1 and not pools[-1].new)
        return passed[0]

    monkeypatch.setattr(Pool, "make", make)
    clocks = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
    monkeypatch.setattr("grpo.extras.ahead.pool.time", clocks)
    settings = f"rollout.ahead=1 max_turns=2 rollout.patience=1 {READY}"
    settings += " +callbacks.updates={_target_:test_pool.Updates,update:99}"
    line = (
        r"rollout.patience=1 s.*1 groups, the first is prompt \d of rollout [12] \(1 episodes wait for an environment"
    )
    with pytest.raises(RolloutError, match=line):
        run(settings, task={"_target_": "test_pool.Held"})


def test_groups_that_are_issued_again_have_the_seeds_of_their_places(tmp_path):
    """The third and the fourth of a rollout of four come again. Their seeds are those that they have in the whole rollout."""
    seen: list[tuple[str, list[int]]] = []

    def player(task, examples, size, engine, renderer, sampling, seeds, limits, finished):
        seen.extend((example, [seeds(p, s, 1) for s in range(size)]) for p, example in enumerate(examples))
        return []

    plan = SimpleNamespace(group_size=2, sampling=None, limits=None)
    rollouts = Rollouts(plan, None, None, TransformersEngine(), None, None, str(tmp_path), seed=7, play=player)
    Pool(rollouts, None)._play([Flight((5, 2), "third", begun=5), Flight((5, 3), "fourth", begun=5)])
    places = {"third": 2, "fourth": 3}
    assert seen == [(name, [derive_seed(7, TRAIN, 5, place, s, 1) for s in range(2)]) for name, place in places.items()]


class Unplayed:
    """In place of a thread that plays groups: it goes on for ever."""

    def __init__(self, play) -> None:
        self.failure, self.future = None, Future()


@pytest.fixture
def pool(monkeypatch, tmp_path):
    """Makes a pool with ahead=1, two prompts a rollout, whose groups nobody plays. Version 0 has issued rollouts 0 and 1."""
    monkeypatch.setattr("grpo.extras.ahead.pool.Background", Unplayed)

    def pool(recipe: str = "", issued: bool = True) -> Pool:
        plan = Plan(2, 1, 9, Sampling(4), ahead=1, order="ready", max_staleness=2, stale="drop")
        sampler = Uniform([{"number": number} for number in range(20)], size=2, seed=0)
        made = Pool(
            Rollouts(plan, None, sampler, TransformersEngine(), None, None, str(tmp_path), 7, recipe=recipe), Stop()
        )
        if issued:
            made._issue(0)
        return made

    return pool


def sampled(flight: Flight, *versions: int) -> tuple[Group, float]:
    """Return the group of a flight, one sample of a token by each version, and its seconds."""
    turn = Turn((1,), Completion(versions, (-1.0,) * len(versions), "stop", versions))
    return [Sample(flight.example, Trajectory(()), (turn,), Reward(0.0, False))], 1.5


def test_a_group_is_as_old_as_its_oldest_token_and_comes_again_once(pool):
    """At update 3 the oldest tokens of two groups are 3 and 2 versions old; 2 is the bound. The new one is due at update 5."""
    pool = pool()
    assert {key: flight.begun for key, flight in pool.flights.items()} == {(0, 0): 0, (0, 1): 0, (1, 0): 0, (1, 1): 0}
    pool._issue(1)
    assert pool.flights[2, 0].begun == 1
    old, young = pool.flights[0, 0], pool.flights[0, 1]
    pool.finished = {old.key: sampled(old, 0, 3), young.key: sampled(young, 1, 3)}
    pool._resample(3)
    assert pool.again == 1 and [*pool.finished] == [young.key]
    assert pool.flights[old.key] == Flight(old.key, old.example, begun=3, tries=1)
    assert {waiting.key: waiting.deadline for waiting in pool._waiting() if waiting.deadline is not None} == {
        old.key: 5
    }
    pool.finished[old.key] = sampled(old, 0, 3)
    pool._resample(3)
    assert pool.again == 1 and len(pool.finished) == 2


def test_a_checkpoint_has_the_groups_that_are_finished_and_the_places_of_those_in_flight(pool):
    """One group is with the update, one is finished and two are in flight. With another recipe all four are sampled again."""
    before, resumed, other = pool(), pool(issued=False), pool("another", issued=False)
    flights = {**before.flights}
    learning, finished = sampled(flights[0, 0], 0), sampled(flights[1, 1], 0)
    before.taken = {(0, 0): (before.flights.pop((0, 0)), learning)}
    before.finished = {(1, 1): finished}
    for after in (resumed, other):
        after.load_state_dict(before.state_dict(), learned=1)
        assert after.issued == 2 and {key: flight.example for key, flight in after.flights.items()} == {
            key: flight.example for key, flight in flights.items()
        }
    assert resumed.finished == {(0, 0): learning, (1, 1): finished} and other.finished == {}
    assert [resumed.flights[key].begun for key in ((0, 0), (1, 1), (0, 1), (1, 0))] == [0, 0, 1, 1]


@pytest.mark.parametrize("order", [pytest.param("exact", marks=pytest.mark.slow), "ready"])
def test_a_resumed_run_loses_nothing(run, order, tmp_path):
    """A crash in the fourth rollout, with groups finished and in flight: each of the 12 prompts is learned from once."""
    settings = "rollout.ahead=3 callbacks=[samples,checkpoint] callbacks.checkpoint.every=1"
    settings += f" {READY}" if order == "ready" else ""
    with pytest.raises(RuntimeError, match="the disk is full"):
        run(settings, "+callbacks.crash={_target_:helpers.slots.Crash,rollout:3}", folder="crashed")
    run(settings, f"ckpt_path={tmp_path / 'crashed'} resume.changes=allow", folder="rest")
    learned_from = [
        Run(tmp_path / folder).samples([*numbers]) for folder, numbers in (("crashed", (1, 2, 3)), ("rest", (4, 5, 6)))
    ]
    assert Counter(pd.concat(learned_from).groupby("example").size()) == {2: 12}
    assert not list((tmp_path / "rest" / "discarded").glob("*"))
    if order == "ready":
        with pytest.raises(UserError, match=r"in flight: resume with rollout.order=ready"):
            run("rollout.ahead=3", f"ckpt_path={tmp_path / 'crashed'} resume.changes=allow", folder="other")
    if order == "exact":
        _, whole = run(settings, folder="whole")
        assert whole.completion.tolist() == pd.concat(learned_from).completion.tolist()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({}, None),
        ({"engine": SimpleNamespace(in_flight=True)}, "cannot sample for several rollouts"),
        ({"sampler": SimpleNamespace(groups=list)}, "a source gives whole rollouts"),
        ({"sampler": SimpleNamespace(observe=print)}, "chooses prompts by the rewards"),
        ({"selection": Dynamic()}, "selection Dynamic decides by a whole rollout"),
        ({"task": SimpleNamespace(state_dict=lambda: {"seen": 1})}, "has a state"),
        ({"play": lambda task, examples: []}, "does not report groups"),
    ],
)
def test_where_groups_cannot_be_handed_over_one_by_one_a_line_says_why(part, reason):
    usual = {"engine": SimpleNamespace(in_flight=True, concurrent=True), "sampler": None, "task": None, "play": play}
    found = one_by_one(SimpleNamespace(**usual | {"selection": Everything()} | part))
    assert found is reason or reason in found


def test_what_cannot_be_ahead_is_refused(run):
    with pytest.raises(UserError, match=r"Plan.max_staleness=1 is below Plan.ahead=2.*raise it, or lower"):
        Plan(2, 2, 4, Sampling(4), ahead=2, max_staleness=1)
    with pytest.raises(UserError, match="needs an engine with its own copy"):
        run("rollout.ahead=2 engine._target_=grpo.engines.builtin.engine.TransformersEngine")
