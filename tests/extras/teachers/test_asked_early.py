"""A served teacher is asked as each completion ends, and never again for the same rollout. Its server has no model."""

import threading
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from helpers.foreign_server import SCORES, Scorer
from helpers.learning import GROUPS, fresh, rollout
from helpers.taught import taught

from grpo.env.tokens import Completion, Turn
from grpo.extras.teachers.early import Beforehand
from grpo.extras.teachers.kinds import Passes
from grpo.extras.teachers.module import Lessons
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Teaching
from grpo.extras.vllm_server import pool
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate
from train import train

NUMBERS, LIKELY = Passes(1.0), Teaching(1.0, "reverse", top_k=4, top_of="teacher")
PLAYED = SimpleNamespace(groups=GROUPS)
TURNS = [turn for group in GROUPS for sample in group for turn in sample.turns]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE", 0.02)


class Slow:
    """An engine that ends one completion after another, and the next one only when the teacher was asked about the latest.

    server: of the teacher; None: it does not wait. reports: whether it says that a completion is finished."""

    context, eager = 99, False

    def __init__(self, server: Scorer | None, reports: bool = True) -> None:
        self.server, self.reports = server, reports

    def sample(self, prompts, sampling, seeds, done=None):
        before = self.server.asked if self.server else 0
        for i, turn in enumerate(TURNS):
            if self.reports:
                done(i, turn.completion)
            end = time.monotonic() + 20
            while self.server and self.server.asked <= before + i and time.monotonic() < end:
                time.sleep(0.005)
        return [turn.completion for turn in TURNS]


def rollouts_of(server: Scorer | None, reports: bool = True, heat: float = 1.0) -> SimpleNamespace:
    """Return what plays the rollout of GROUPS."""

    def play(task, examples, size, engine):
        assert engine.context == 99  # of the engine itself
        given = []
        sampling = SimpleNamespace(temperature=heat)
        engine.sample([turn.prompt_ids for turn in TURNS], sampling, range(4), lambda i, one: given.append(i))
        assert given == ([*range(4)] if reports else [])
        return GROUPS

    engine = Slow(server, reports)
    made = SimpleNamespace(play=play, plan=SimpleNamespace(most_stale=0))
    made.make = lambda: made.play(None, [], 2, engine)
    return made


def served(toy, toy_model, server, teaching=None, **settings) -> Served:
    teacher = Served([server.url], Pretrained(str(toy)), **{"wait": 5.0} | settings)
    teacher.check(teaching or Teaching(1.0), 1.0)
    teacher.attach(toy_model)
    return teacher


def right(batch) -> torch.Tensor:
    return torch.where(batch.mask, -1 - batch.ids[:, batch.prompt_width :] / 1000, 0.0)


def test_a_completion_is_asked_for_before_the_next_one_ends(toy, toy_model):
    batch = collate(GROUPS)
    with Scorer() as server:
        teacher, rollouts, first = served(toy, toy_model, server), rollouts_of(server), server.asked
        teacher.extended(batch, PLAYED, rollouts)  # from here on it hears of completions
        rollouts.make()
        assert server.asked == first + 4
        teacher.extended(batch, PLAYED, rollouts)
        torch.testing.assert_close(teacher.logprobs(batch, NUMBERS), right(batch))
        assert server.asked == first + 4
        teacher.forget()
        torch.testing.assert_close(teacher.logprobs(batch, NUMBERS), right(batch))  # of a rollout that it did not hear
        assert server.asked == first + 8


@pytest.mark.parametrize("reports", [True, False])
def test_what_failed_early_is_asked_for_with_the_rollout(toy, toy_model, reports):
    """Two of four answers are lost; an engine may also report nothing before its end."""
    batch, calls = collate(GROUPS), count()
    with Scorer() as server:
        teacher, rollouts = served(toy, toy_model, server), rollouts_of(None, reports)
        teacher.extended(batch, PLAYED, rollouts)
        server.routes[SCORES] = lambda body: (500, None) if next(calls) % 2 else server.score(body)
        rollouts.make()
        for _, future in teacher.early.asked.values():
            future.result()
        server.routes[SCORES], first = server.score, server.asked
        teacher.extended(batch, PLAYED, rollouts)
        torch.testing.assert_close(teacher.logprobs(batch, NUMBERS), right(batch))
        assert server.asked == first + 2


def test_a_server_that_hangs_is_asked_no_more_until_the_rollout_is_there(toy, toy_model):
    """One request at a time: the first of four is given up after 0.3 s, and the others are not sent."""
    open_again = threading.Event()
    with Scorer() as server:
        teacher, rollouts = served(toy, toy_model, server, timeout=0.3, concurrency=1), rollouts_of(None)
        teacher.extended(collate(GROUPS), PLAYED, rollouts)
        server.routes[SCORES], first = lambda body: open_again.wait(60) and server.score(body), server.asked
        rollouts.make()
        assert [future.result() for _, future in teacher.early.asked.values()] == [None] * 4
        assert server.asked <= first + 1 and teacher.pool.servers[0].fault
        open_again.set()


def test_greedy_answers_and_old_ones_are_not_kept(toy, toy_model):
    batch = collate(GROUPS)
    with Scorer() as server:
        teacher, rollouts = served(toy, toy_model, server), rollouts_of(None, heat=0.0)
        teacher.extended(batch, PLAYED, rollouts)
        rollouts.make()
        assert not teacher.early.asked
    early = Beforehand(None)
    early.asked = {(1,): (0, SimpleNamespace(result=lambda: "a")), (2,): (0, SimpleNamespace(cancel=lambda: None))}
    assert early.claim([(1,)], 1) == {(1,): "a"} and [*early.asked] == [(2,)]
    assert early.claim([], 1) == {} and not early.asked


def test_the_turns_of_a_row_are_answers_of_their_own(toy, toy_model):
    """Two turns in one row, tokens of the environment between them."""
    [sample] = GROUPS[0][:1]
    first = sample.turns[0]
    second = Turn((*first.ids, 40, 41), Completion((31, 32, 33), (-0.5,) * 3, "stop"))
    groups = [[replace(sample, turns=(first, second))]]
    batch, made = collate(groups), SimpleNamespace(groups=groups)
    assert batch.mask.tolist() == [[True, True, False, False, True, True, True]]
    with Scorer() as server:
        teacher, rollouts = served(toy, toy_model, server), rollouts_of(None)
        teacher.extended(batch, made, rollouts)
        for turn in (first, second):
            teacher.early.hear(turn.prompt_ids, turn.completion.ids)
        teacher.extended(batch, made, rollouts)
        asked = server.asked
        torch.testing.assert_close(teacher.logprobs(batch, NUMBERS), right(batch))
        assert server.asked == asked


def threads_that_ask() -> int:
    return sum(thread.name == "teacher" for thread in threading.enumerate())


def test_its_thread_ends_with_the_run_and_another_run_has_one_again(toy, toy_model):
    """A request that hangs is given up; a thread of rollouts ahead may still report completions, and nobody is asked."""
    open_again, before = threading.Event(), threads_that_ask()
    with Scorer() as server:
        teacher, rollouts = served(toy, toy_model, server), rollouts_of(None)
        teacher.extended(collate(GROUPS), PLAYED, rollouts)
        # it hangs up then, and counts nothing
        server.routes[SCORES] = lambda body: open_again.wait(60) and (None, None)
        teacher.early.hear((1,), (2,))
        [(_, future)] = teacher.early.asked.values()
        assert threads_that_ask() == before + 1
        lessons = Lessons(teacher)
        lessons.close()
        lessons.close()
        assert threads_that_ask() == before and future.cancelled()
        open_again.set()
        server.routes[SCORES], first = server.score, server.asked
        rollouts.make()
        assert not teacher.early.asked and server.asked == first
        teacher.extended(collate(GROUPS), PLAYED, rollouts := rollouts_of(server))
        rollouts.make()
        assert server.asked == first + 4 and threads_that_ask() == before + 1
        lessons.close()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_no_thread_is_left_by_a_run(toy, tmp_path, ahead):
    before = threads_that_ask()
    with Scorer() as server:
        words = f"""algo=opd teacher=server teacher.urls=[{server.url}] model=path model.path={toy} debug=smoke callbacks=none
            rollout.prompts=3 rollout.group_size=2 rollout.num_rollouts=4 max_tokens=8 forecast=false preflight=off
            trainer=cpu rollout.ahead={ahead} algo.old_policy=rollout engine=transformers_copy output_dir={tmp_path}"""
        train(compose_config(*words.split()))
        assert server.asked > 18 and threads_that_ask() == before


@pytest.mark.slow
def test_distributions_are_asked_for_once_in_all_epochs(toy):
    """Three epochs of two minibatches, cut into single rows: four rows, four requests, and the same numbers."""
    cut = {"num_epochs": 3, "num_minibatches": 2, "max_tokens_per_microbatch": 1}
    settings = {name: getattr(LIKELY, name) for name in ("divergence", "top_k", "top_of")}
    found = []
    with Scorer() as server:
        for forgets in (False, True):
            teacher = Served([server.url], Pretrained(str(toy)), wait=5.0)
            if forgets:
                teacher.prepare = lambda *_: None
            module, before = taught(fresh(toy), teacher, **settings, **cut), server.asked
            found.append(module.training_step(rollout(), 0)["teacher/divergence"])
            assert server.asked - before == (12 if forgets else 4)
    assert found[0] == pytest.approx(found[1], abs=1e-6) and found[0] > 0.1
