"""Pieces of one's own that cannot work are one line with their name and place, before a model is loaded; sound ones pass."""

import re
from functools import partial

import lightning as L
import numpy as np
import pytest
from conftest import compose_config
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Timer

from grpo.apps.own_pieces import check_own, tried_sampler, tried_selection
from grpo.extras.selection.samplers import Weighted
from grpo.rollout.types import Plan
from grpo.system.errors import UserError
from grpo.system.progress import set_progress

ROWS = [{"question": str(i), "source": "sums" if i % 2 else "words"} for i in range(8)]


class Sound:
    """A sampler that counts what it was asked; the run's own must begin at 0."""

    def __init__(self, examples, size, seed):
        self.examples, self.seen = examples, 0

    def draw(self, rollout, count, first=0):
        return self.examples[first : first + count]

    def observe(self, results):
        self.seen += len(results)

    def progress(self, rollouts):
        return {"data/seen": float(self.seen)}


class Few(Sound):
    def __init__(self, examples):
        super().__init__(examples, 1, 0)


class Number(Sound):
    def draw(self, rollout, count, first=0):
        return 3


class Blind(Sound):
    def observe(self, results):
        raise KeyError("question")


def moving(column, progress):
    return [progress.share for _ in column]


def two(history):
    return [1.0, 2.0]


def fails(solved):
    return solved / {}


def faded(examples, progress, solved):
    share = progress.share
    return [share if example["source"] == "sums" else 1 - share for example in examples]


def weighted(function):
    return partial(Weighted, weight=function)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Few, "takes 2 positional arguments but 4 were given"),
        (Number, "draw must return a list of at most 4 examples, and gave int"),
        (Blind, "KeyError: 'question'"),
        (weighted(moving), "needs 'column'; a weight function may name history, examples, rewards, solved, progress"),
        (weighted(two), "must return 8 numbers that are not negative, one for each example, and gave (2,)"),
        (weighted(fails), "raised TypeError"),
        (weighted(lambda history: -np.ones(8)), "and gave -1.0"),
    ],
)
def test_a_sampler_that_cannot_work_is_one_line(make, words):
    with pytest.raises(UserError) as refusal:
        tried_sampler(make, ROWS, 4, 0)
    line = str(refusal.value)
    assert re.match(r"sampler(\.weight)? \([\w<>]+, .*test_own_pieces\.py:\d+", line), line
    assert words in line and "\n" not in line, line


def test_a_sampler_of_ones_own_begins_as_it_was_made():
    assert tried_sampler(Sound, ROWS, 4, 0).seen == 0
    set_progress(0, 10)
    sampler = tried_sampler(weighted(faded), ROWS, 4, 0)
    assert {example["source"] for example in sampler.draw(0, 4)} == {"words"}  # at the start of the run the share is 0


class Half:
    """A selection that counts what it was asked; the run's own must begin at 0."""

    seen = 0

    def select(self, draw):
        self.seen += 1
        groups = draw.more(draw.prompts)
        rewards = draw.scores(groups).rewards
        assert rewards.tolist() == [[0.0, 1.0]] * 4
        return [group[1:] for group in groups]


class Bare:
    def select(self):
        return []


class Wrong:
    def select(self, draw):
        return draw.scores(draw.more(draw.prompts)).rewards


class Lost:
    def select(self, draw):
        return draw.fewer(3)


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Bare(), "takes 1 positional argument but 2 were given"),
        (Wrong(), "select must return a list of groups, lists of samples, and gave Tensor"),
        (Lost(), "has no attribute 'fewer'"),
    ],
)
def test_a_selection_that_cannot_work_is_one_line(selection, words):
    config = compose_config("output_dir=.", "rollout.prompts=4", "rollout.group_size=2", "algo.num_minibatches=1")
    plan, algorithm = instantiate(config.rollout), instantiate(config.algo)
    assert isinstance(plan, Plan)
    assert tried_selection(half := Half(), plan, ROWS, algorithm, 0) is half and half.seen == 0
    with pytest.raises(UserError, match=rf"^selection \({type(selection).__name__}, .*own_pieces\.py:\d+") as refusal:
        tried_selection(selection, plan, ROWS, algorithm, 0)
    assert words in str(refusal.value)


class Engine:
    version = context = None

    def load_weights(self, model):
        pass


class Late(L.Callback):
    def on_train_batch_end(self, trainer, module):
        pass


class Unheard(L.Callback):
    def on_validation_end(self, trainer, module):
        pass


class Clock(Timer):
    """Lightning's own has hooks of validation."""

    def on_train_start(self, trainer, module):
        pass


class Fine(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass

    def on_train_start(self, *given):
        pass


def short_play(task, examples):
    return []


def test_a_player_an_engine_and_a_callback_are_called_as_the_run_calls_them():
    check_own(lambda *given: [], object(), [Fine(), Clock()], L.Callback)
    for pieces, words in [
        ((short_play, None, []), "play (short_play, "),
        ((None, Engine(), []), "load_weights must take (model, version): too many positional arguments"),
        (
            (None, None, [Fine(), Late()]),
            "on_train_batch_end must take (trainer, pl_module, outputs, batch, batch_idx)",
        ),
        ((None, None, [Unheard()]), "a run never calls on_validation_end: take on_train_batch_end"),
    ]:
        with pytest.raises(UserError, match=r"test_own_pieces\.py:\d+") as refusal:
            check_own(*pieces, L.Callback)
        assert words in str(refusal.value), str(refusal.value)
