"""Reward functions: their form, combinations, shipped functions, reward models, the profile."""

import asyncio
import itertools
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers.episodes import said
from hydra.errors import MissingConfigException
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from grpo.config.explain import explain
from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.grading import functions
from grpo.extras.judges.reward_model import positions
from grpo.rewards.combined import Rewards, as_lists
from grpo.rewards.resolve import locate
from grpo.rewards.row_task import RowTask
from grpo.rollout.samples_table import records
from grpo.rollout.types import Sample
from grpo.system.calls import Calls
from grpo.system.errors import RewardError, UserError
from grpo.system.progress import BEGIN, Progress, set_progress


def letters(completions, **columns):
    return [float(len(text)) for text in completions]


def no_kwargs(completions, level):
    return [float(n) for n in level]


async def later(completions, **columns):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


# -- the form


def test_a_function_gets_lists_with_every_column(monkeypatch):
    seen = {}

    def spy(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [0] * len(completions)

    Rewards(spy).score({"gold": "4", "level": 3}, [said("four", length=2, truncated=True), said("4", length=1)])
    assert {name: value for name, value in seen.items() if isinstance(value, list)} == {
        "prompts": ["2 + 2?", "2 + 2?"], "completions": ["four", "4"], "gold": ["4", "4"], "level": [3, 3],
        "truncated": [True, False], "lengths": [2, 1], "completion_ids": [[0, 1], [0]], "outcomes": [None, None],
    }  # fmt: skip
    assert {name for name in seen if not isinstance(seen[name], list)} == {"trainer_state", "log_metric", "log_extra"}
    assert [r.value for r in Rewards(no_kwargs).score({"level": 7, "other": 1}, [said("a"), said("b")])] == [7, 7]


def test_conversations_are_lists_of_messages_and_a_prefill_is_joined():
    user, prefill = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is "}
    trajectory = said("4.", Message("user", "2 + 2?"), Message("assistant", "It is "))
    given = as_lists({"prompt": [user, prefill]}, [trajectory])
    assert given["prompts"] == [[user]] and given["completions"] == [[{"role": "assistant", "content": "It is 4."}]]
    called = Message("assistant", "4.", (ToolCall("add", {"a": 2}),))
    answered = Step(State(tuple(trajectory.steps[0].state.messages)), Action(called))
    given = as_lists({}, [Trajectory((answered,))], conversational=True)["completions"][0][0]
    assert given["content"] == "It is 4." and given["tool_calls"][0]["function"]["name"] == "add"
    # several turns: all that came after the first prompt
    first, second = State((Message("user", "q"),)), Message("tool", "t")
    steps = (
        Step(first, Action(Message("assistant", "a"))),
        Step(State((*first.messages, Message("assistant", "a"), second)), Action(Message("assistant", "b"))),
    )
    given = as_lists({}, [Trajectory(steps)], conversational=True)
    assert [m["content"] for m in given["completions"][0]] == ["a", "t", "b"] and len(given["prompts"][0]) == 1


def test_the_reward_is_a_weighted_sum_with_the_parts_by_name():
    rewards = Rewards([letters, later], [0.1, 2.0]).score({}, [said("abc"), said("")])
    assert [r.value for r in rewards] == pytest.approx([1.3, 1.0])
    assert [dict(r.parts) for r in rewards] == [{"letters": 3.0, "later": 0.5}, {"letters": 0.0, "later": 0.5}]
    assert [r.correct for r in rewards] == [True, True]  # the values reach `solved`
    assert not Rewards(later).score({}, [said("x")])[0].correct


def test_none_is_not_applicable_and_nothing_but_none_is_no_reward(caplog):
    def sums(completions, **columns):
        return [1.0 if "+" in text else None for text in completions]

    def products(completions, **columns):
        return [3.0 if "*" in text else None for text in completions]

    a, b, both, none = Rewards([sums, products], [1, 2]).score({"id": 1}, [said(t) for t in ("+", "*", "+*", "-")])
    assert (a.value, b.value, both.value) == (1.0, 6.0, 7.0)
    assert math.isnan(none.value) and none.outcome is None and a.parts == {"sums": 1.0}
    assert caplog.text.count("no reward function (sums, products) applies") == 1


def test_what_is_only_logged_is_no_reward():
    def never(completions, **columns):
        return [None] * len(completions)

    (reward,) = Rewards([never, letters], [1, 0]).score({}, [said("ab")])
    assert math.isnan(reward.value) and reward.parts == {"letters": 2.0}

    def unknown(completions, **columns):
        return [Reward(math.nan, True, {"unknown": 7.0})] * len(completions)

    (reward,) = Rewards([unknown, letters], [0, 1]).score({}, [said("ab")])
    assert reward.value == 2.0 and reward.parts == {"unknown": 7.0, "letters": 2.0}


def test_what_nobody_could_tell_is_never_a_zero():
    def hard(completions, **columns):
        return [Reward(math.nan, False, outcome="timeout"), Reward(1.0, True, {"steps": 2.0}, "right")]

    unknown, right = Rewards([hard, letters], [1, 1]).score({}, [said("ab"), said("ab")])
    assert math.isnan(unknown.value) and unknown.outcome == "timeout" and unknown.parts == {"letters": 2.0}
    assert (right.value, right.correct, right.outcome) == (3.0, True, "right")
    assert right.parts == {"steps": 2.0, "letters": 2.0}


def test_an_advantage_and_columns_come_through_whoever_gave_them():
    """The advantage of the first and the verdict of the second; both columns; two advantages have no meaning."""

    def first(completions):
        return [Reward(1.0, True, {"a": 1.0}, advantage=0.3, extra={"why": "long"})] * len(completions)

    def second(completions):
        return [Reward(0.0, False, {"b": 0.0}, extra={"line": 7})] * len(completions)

    (reward,) = Rewards([first, second]).score({"question": "?"}, [said("x")])
    assert (reward.advantage, reward.correct, reward.extra) == (0.3, False, {"why": "long", "line": 7})

    def third(completions):
        return [Reward(0.0, True, {"c": 0.0}, advantage=-1.0)] * len(completions)

    with pytest.raises(RewardError, match="'third' is the second reward function that gives an advantage"):
        Rewards([first, third]).score({"question": "?"}, [said("x")])


def test_two_parts_of_one_name_are_refused():
    def steps(completions, **columns):
        return [Reward(1.0, True, {"letters": 2.0})] * len(completions)

    with pytest.raises(RewardError, match="two reward functions give a part 'letters'"):
        Rewards([letters, steps]).score({}, [said("ab")])
    assert Rewards([steps, later]).score({}, [said("ab")])[0].parts == {"letters": 2.0, "later": 0.5}


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda **_: [1.0], r"gave 1 value for 2 completions"),
        (lambda **_: [1.0, math.nan], r"gave nan: a number from -1e\+18 to 1e\+18, or None"),
        (lambda **_: [1.0, math.inf], r"gave inf"),
        (lambda **_: [1.0, "good"], r"gave 'good', which is no number"),
        (lambda **_: [1.0, "0.5"], r"gave '0.5', which is no number"),
        (lambda **_: [1e30, 1.0], r"gave 1e\+30: a number from"),  # its variance is infinite in float32
        (lambda **_: [10**400, 1.0], r"gave '10+', which is no number"),
        (lambda **_: 1.0, r"gave float, not a list of 2 values"),
        (lambda **_: {0: 1.0, 1: 2.0}, r"gave dict, not a list of 2 values"),
        (lambda **_: "12", r"gave str, not a list of 2 values"),
        (lambda **_: itertools.count(), r"gave 3 values for 2 completions"),
        (lambda **_: (1 / (1 - i) for i in range(2)), r"raised ZeroDivisionError"),
        (lambda **_: os.chdir("/"), r"changed the working directory from \S+ to /: restore it before returning"),
        (
            lambda **_: torch.set_default_dtype(torch.float64),
            r"changed torch's default dtype from torch.float32 to torch.fl",
        ),
        (lambda **_: setattr(sys, "stdout", None), r"changed sys.stdout.closed from False to True"),
        (lambda **_: logging.disable(), r"changed logging.disable from 0 to 50"),
        (lambda **_: torch.set_grad_enabled(False), r"changed torch's gradient mode from True to False: restore it"),
        (lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN), r"changed signal handlers: SIGTERM: restore it"),
        (lambda **_: {}["gold"], r"raised KeyError: 'gold' \(test_combined.py, line \d+\)"),
    ],
)
def test_what_is_no_reward_is_told_with_the_function_that_gave_it(gives, message, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # one of them ends it
    gives.__name__ = "mine"
    with pytest.raises(RewardError, match=f"the reward function 'mine' {message}"):
        Rewards(gives).score({}, [said("a"), said("b")])
    assert os.getcwd() != "/" and torch.get_default_dtype() is torch.float32 and not logging.root.manager.disable
    assert torch.is_grad_enabled() and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN


def test_what_honest_functions_change_is_put_back_and_told_once(monkeypatch, caplog):
    def seeds(completions, **columns):
        torch.manual_seed(7)
        torch.rand(3)
        return [1.0] * len(completions)

    async def environment(completions, **columns):
        os.environ.update(A_SECRET="value-of-it", HOME="/elsewhere")
        os.environ.pop("GONE", None)
        return [1.0] * len(completions)

    def threads(completions, **columns):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return [random.random() + torch.rand(1).item() for _ in completions]  # draws are its own

    monkeypatch.setenv("GONE", "1")
    before, seed, count = os.environ.copy(), torch.initial_seed(), torch.get_num_threads()
    for _ in range(2):
        Rewards([seeds, environment, threads]).score({}, [said("a"), said("b")])
    assert (os.environ.copy(), torch.initial_seed(), torch.get_num_threads()) == (before, seed, count)
    said_of = [record.getMessage().partition(": it was put back")[0] for record in caplog.records]
    assert said_of == [
        f"the reward function 'seeds' changed torch's random seed from {seed} to 7",
        f"the reward function 'threads' changed torch's number of threads from {count} to {count + 1}",
        "one of the reward functions seeds, environment, threads changed environment variables: A_SECRET, GONE, HOME",
    ]


def test_a_task_and_an_environment_are_named_too():
    def step():
        torch.set_grad_enabled(False)

    async def called():
        calls = Calls(1, "an environment of Mine")
        given = await calls.run(0, 60.0, step), await calls.run(0, 60.0, torch.is_grad_enabled)
        calls.close()
        return given

    refused, after = asyncio.run(called())
    assert str(refused).startswith("an environment of Mine changed torch's gradient mode from True to False") and after


@pytest.mark.parametrize(
    "gives", [torch.tensor, np.array, iter, tuple, lambda v: [np.float32(x) for x in v], lambda v: [x > 0 for x in v]]
)
def test_every_form_of_a_list_of_numbers_is_read_and_arguments_are_copies(gives):
    def greedy(completions, **columns):
        completions.clear()
        return gives([1.0, 0.0])

    given = Rewards([greedy, letters]).score({}, [said("a"), said("b")])
    assert [reward.value for reward in given] == [2.0, 1.0]


# -- the set-up


def test_names_paths_and_files(tmp_path, monkeypatch):
    assert locate("correct") is functions.correct
    assert locate("math.sqrt") is math.sqrt
    (tmp_path / "mine_rewards.py").write_text(
        "def brevity(completions, **_):\n    return [-len(c) for c in completions]\n"
    )
    by_file = Rewards(f"{tmp_path}/mine_rewards.py:brevity")
    assert by_file.names == ["brevity"] and by_file.score({}, [said("abc")])[0].value == -3
    (tmp_path / "judge.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    assert Rewards(f"{tmp_path}/judge.py:reward").names == ["judge.reward"]  # `reward` is the name of the sum
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("mine_rewards.brevity")(completions=["ab"]) == [-2]


def test_a_file_is_run_once_and_may_have_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Judge:\n    name: str\n\nJUDGE = Judge('j')\n\n"
        "def a(completions):\n    return JUDGE\n\ndef b(completions):\n    return JUDGE\n"
    )
    a, b = (locate(f"{tmp_path}/mine.py:{name}") for name in "ab")
    assert a([]) is b([])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corect", "did you mean correct?"),
        (
            "nothing_like_it",
            "no reward function 'nothing_like_it'. Give one of same_text, environment, ungraded, correct",
        ),
        ("no_module_here.f", "cannot be imported: ModuleNotFoundError: No module named 'no_module_here'"),
        ("math.sqroot", "'math.sqroot' is not there: math has acos"),
        ("nowhere.py:f", "cannot be imported: FileNotFoundError: there is no file nowhere.py"),
        ("nobody/nothing", "the reward model nobody/nothing is neither a folder with one nor on the hub"),
    ],
)
def test_names_that_mean_nothing_are_told(name, message):
    with pytest.raises(UserError) as error:
        Rewards(name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_module_that_exits_is_told(tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"exits\.py:f' cannot be imported: SystemExit: 0"):
        Rewards(f"{tmp_path}/exits.py:f")


def test_a_coroutine_that_exits_is_told():
    async def leaves(completions):
        raise SystemExit(0)

    with pytest.raises(RewardError, match="leaves' raised SystemExit: 0"):
        Rewards(leaves).score({}, [said("a")])


def test_the_rest_of_trls_contract():
    """TRL's functions name what they need of: the tokens, how far the training is, and ways to log."""

    def full(completions, completion_ids, trainer_state, log_metric, log_extra, **kwargs):
        assert "progress" not in kwargs and "environments" not in kwargs
        log_metric("longest", max(map(len, completion_ids)))
        log_extra("seen", completions)
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    def ramp(completions, progress):
        return [progress.share] * len(completions)

    async def rest(**kwargs):  # as TRL's functions read it
        assert {"log_metric", "log_extra"} < kwargs.keys() and "progress" not in kwargs
        return [kwargs["trainer_state"].global_step] * len(kwargs["completions"])

    set_progress(3, 12)
    try:
        one, two = Rewards([full, ramp, rest], [1, 1, 0]).score({}, [said("ab", length=2), said("c", length=1)])
    finally:
        set_progress(0, 1)
    assert (one.value, two.value) == (0.5, 0.5) and dict(one.parts) == {
        "full": 0.25,
        "ramp": 0.25,
        "rest": 3,
        "longest": 2.0,
    }
    assert (one.extra, two.extra) == ({"seen": "ab"}, {"seen": "c"}) and two.parts["longest"] == 2.0
    [row, _] = records([[Sample({}, said("ab"), (), reward) for reward in (one, two)]])
    assert (row["extra/seen"], row["reward/longest"]) == ("ab", 2.0)


def test_a_column_that_is_too_short_is_refused_with_its_function():
    def short(completions, log_extra):
        log_extra(column="seen", values=completions[:1])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="short' raised ValueError"):
        Rewards(short).score({}, [said("a"), said("b")])


def test_an_environments_own_reward_is_one_of_the_functions():
    won, silent = (replace(said("a"), reward=reward) for reward in (Reward(2.0, True, {"moves": 3}), None))
    first, second = Rewards(["environment", letters]).score({}, [won, silent])
    assert (first.value, first.correct, first.parts) == (3.0, True, {"moves": 3, "letters": 1.0})
    assert (second.value, second.parts) == (1.0, {"letters": 1.0})

    def turns(environments):
        return [float(env) for env in environments]

    assert [r.value for r in Rewards(turns).score({}, [won, silent], envs=[4, 5])] == [4.0, 5.0]


def test_the_form_of_a_completion_does_not_depend_on_siblings():
    class Talk(RowTask):
        def build(self, example):
            return None

    class Ask(RowTask):
        def messages(self, example):
            return (Message("user", "2 + 2?"),)

    kinds = []

    def kind(completions, **columns):
        kinds.extend(type(completion) for completion in completions)
        return [0.0] * len(completions)

    for task in (Talk(None, kind), Ask(None, kind)):
        task.score({}, said("4"))
    assert kinds == [list, str]


def now(rewards: Rewards, progress: Progress = BEGIN) -> list[float]:
    return [weight(progress) for weight in rewards.weights]


def test_a_weight_may_follow_a_schedule():
    fades = {"schedule": "linear", "from": 0.5, "to": 0.0, "until": 0.4}
    rewards = Rewards([letters, later], [1.0, fades])
    assert [now(rewards, Progress(r, 10))[1] for r in (0, 2, 4, 9)] == [0.5, 0.25, 0.0, 0.0]
    cosine = Rewards([letters], [{"schedule": "cosine", "from": 0, "to": 1}])
    assert [round(now(cosine, Progress(r, 4))[0], 6) for r in (0, 1, 2)] == [0, 0.146447, 0.5]
    step = Rewards([letters], {"letters": {"schedule": "step", "from": 0, "to": 1, "until": 0.5}})
    assert [now(step, Progress(r, 4))[0] for r in (1, 2)] == [0, 1]
    for wrong in (
        {"schedule": "square", "from": 0, "to": 1},
        {"from": 0, "to": 1},
        {"schedule": "linear", "from": "a", "to": 1},
    ):
        with pytest.raises(
            UserError, match=r"task\.weights\.letters=.* is neither a number nor \{schedule: linear or cosine"
        ):
            Rewards([letters], [wrong])
    with pytest.raises(UserError, match="until=2 must be above 0 and at most 1"):
        Rewards([letters], [{**fades, "until": 2}])


def test_weights_that_do_not_match_and_names_that_clash():
    with pytest.raises(UserError, match=r"number of reward weights \(1\) must match number of reward functions \(2\)"):
        Rewards([letters, later], [1.0])
    with pytest.raises(UserError, match=r"task\.weights names 'leters', but the rewards are letters, later"):
        Rewards([letters, later], {"leters": 1.0})
    assert now(Rewards([letters, later, no_kwargs], {"later": 0.5}, 1.0, {"letters": 0.1, "later": 2.0})) == [
        0.1,
        0.5,
        1.0,
    ]
    assert now(Rewards([letters, later], None, 1.0, {"letters": 0.1, "format": 0.0})) == [0.1, 1.0]
    with pytest.raises(UserError, match="two reward functions are called 'letters'"):
        Rewards([letters, partial(letters, per=2)])
    with pytest.raises(UserError, match="rewards is empty"):
        Rewards([])


def test_a_column_that_a_function_needs_is_missed_before_anything_runs():
    rewards = Rewards([letters, no_kwargs, partial(functions.overlong, limit=8, buffer=4)])
    rewards.check(["level"], "train")
    with pytest.raises(UserError, match="'correct' needs 'gold'"):
        Rewards(functions.Normalised("correct", 0, 1)).check(["level"], "train")
    with pytest.raises(UserError, match=r"'no_kwargs' needs 'level', which is no column of train \(other\)"):
        rewards.check(["other"], "train")


# -- shipped functions


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("function", "arguments", "values"),
    [
        (functions.longer, {"completions": [" blue.", " in the sky."]}, [6.0, 12.0]),
        (functions.longer, {"completions": ["a" * 250], "per": 500}, [0.5]),
        (functions.near_length, {"completions": ["a" * 23, "a" * 20]}, [-3.0, 0.0]),
        (functions.near_number, {"completions": ["9 - 7 = 2\n", "10. It is 5", "-2", "none", "<think>2</think>1,001.5"],
                                 "gold": [2, "2", 2, 2, "1,000"]}, [1.0, 0.25, 0.2, 0.0, 0.4]),
        (functions.unique_letters, {"completions": chat("banana", "")}, [3.0, 0.0]),
        (functions.format, {"completions": ["\\boxed{2}", "2", "\\boxed{?}"]}, [1.0, 0.0, 0.0]),
        (functions.think_answer, {"completions": chat("<think>1</think><answer>2</answer>", "<think>1<answer>2</answer>",
                                                      "a<think>1</think><answer>2</answer>",
                                                      "<think>1</think><answer>2</answer>b",
                                                      "<think> </think><answer>2</answer>")}, [1.0, 0.0, 0.0, 0.0, 0.0]),
        (functions.think_levels, {"completions": ["", "<think>a", "<think>a</think></think>", "<think> </think>b",
                                                  "<think>a</think>b", "<think>a</think>" * 2]},
         [0.0, 0.25, 0.5, 0.75, 1.0, 0.5]),
        (functions.overlong, {"completions": ["x"] * 5, "lengths": [60, 80, 90, 130, 1], "limit": 100, "buffer": 40},
         [0.0, -0.5, -0.75, -1.0, 0.0]),
        # words a b c a b c: one of the four triples is repeated
        (functions.repetition, {"completions": ["a b c a b c", "a b", "x x x x"]}, [-0.25, 0.0, -0.5]),
    ],
)  # fmt: skip
def test_shipped_functions(function, arguments, values):
    assert function(**arguments) == pytest.approx(values)


def test_correct_and_what_is_built_on_it():
    texts = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}.", "no idea"]
    given = functions.correct(texts, gold=["2", "5", "2"], wrong=-1.0)
    assert [(r.value, r.correct, r.outcome) for r in given] == [
        (1.0, True, "right"), (-1.0, False, "wrong"), (-1.0, False, "no_answer")
    ]  # fmt: skip
    # rows from a file may have a number or none
    given = functions.correct(texts, gold=[2, None, None])
    assert [r.outcome for r in given] == ["right", "error", "error"] and math.isnan(given[1].value)
    # half a cosine: at 0, a half and all of the limit
    right = functions.cosine_length([texts[0]] * 3, ["2"] * 3, limit=100, lengths=[0, 50, 200])
    wrong = functions.cosine_length([texts[1]] * 3, ["5"] * 3, limit=100, lengths=[0, 50, 200])
    assert right == pytest.approx([1.0, 0.75, 0.5]) and wrong == pytest.approx([-1.0, -0.75, -0.5])
    assert functions.cosine_length(texts[:1], [None]) == [None]  # no verdict
    with pytest.raises(UserError, match=r"cosine_length: wrong=\[-0.5, -1\] must be \[least, most\]"):
        functions.cosine_length(texts, ["2"] * 2, wrong=(-0.5, -1))
    # length counts only if all siblings are right
    lengths = [40, 75, 100]
    assert functions.long_when_all_right([texts[0]] * 3, ["2"] * 3, 100, lengths) == pytest.approx([0.0, -0.5, -1.0])
    assert functions.long_when_all_right(texts, ["2", "5", "2"], 100, lengths) == [0.0, 0.0, 0.0]


def test_normalised_is_clamped_and_scaled():
    scaled = functions.Normalised(letters, 2, 6)
    assert [r.value for r in Rewards([scaled], [3]).score({}, [said("a"), said("abc"), said("a" * 9)])] == [0, 0.75, 3]
    assert functions.Normalised(letters, 2, 2)(completions=["abc"]) == [0.0]
    found = functions.Normalised(lambda values: values, 2, 6)(values=[3.0, None, math.nan])
    assert found[:2] == [0.25, None] and math.isnan(found[2])
    assert Rewards(functions.Normalised(later, 0, 2)).score({}, [said("a")])[0].parts == {"later": 0.25}
    level = functions.Normalised(no_kwargs, 0, 4)  # it gets and needs the same columns as the function inside
    assert Rewards(level).score({"level": 3, "more": 1}, [said("a")])[0].value == 0.75
    with pytest.raises(UserError, match="'no_kwargs' needs 'level'"):
        Rewards(level).check(["more"], "train")
    graded = Rewards(functions.Normalised(partial(functions.correct, wrong=-1.0), -1, 1))
    assert [(r.value, r.outcome) for r in graded.score({"gold": "2"}, [said("#### 2"), said("#### 3")])] == [
        (1.0, "right"), (0.0, "wrong")
    ]  # fmt: skip
    with pytest.raises(UserError, match="low=3 to high=2"):
        functions.Normalised("correct", 3, 2)


# -- reward models


@pytest.fixture(scope="module")
def judge(toy, tmp_path_factory):
    """A random sequence classifier with the toy's tokenizer, without a pad token."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_reward_model_gives_its_logit(judge):
    """A batch of unequal lengths gives the logits of each text alone, without padding."""
    from grpo.extras.judges.reward_model import Classifier

    rewards = Rewards([str(judge), letters], [1.0, 0.0])
    assert rewards.names == ["judge", "letters"]
    given = rewards.score({}, [said("four"), said("It is four, as anybody can see.")])
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    for reward, text in zip(given, ("2 + 2?four", "2 + 2?It is four, as anybody can see."), strict=True):
        ids = torch.tensor([tokenizer(text).input_ids])
        model.config.pad_token_id = tokenizer.eos_token_id
        assert reward.value == pytest.approx(float(model(ids).logits.detach()[0, 0]), abs=1e-6)
    user, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}
    ids = tokenizer.apply_chat_template([user, answer], return_tensors="pt", return_dict=False)
    (value,) = Classifier(str(judge))(prompts=[[user]], completions=[[answer]])
    assert value == pytest.approx(float(model(ids).logits.detach()[0, 0]), abs=1e-6)
    (value,) = Classifier(str(judge), max_length=3)(prompts=["2 + 2?"], completions=["four"])
    ids = torch.tensor([tokenizer("2 + 2?four").input_ids[-3:]])  # of a text that is too long its end counts
    assert value == pytest.approx(float(model(ids).logits.detach()[0, 0]), abs=1e-6)


def test_a_reward_model_reads_as_many_tokens_as_it_has_positions():
    """RoBERTa begins to count after the place of padding: of 20 positions it uses 18. Llama has no table of them."""
    small = {
        "vocab_size": 9,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    roberta = RobertaForSequenceClassification(RobertaConfig(**small, max_position_embeddings=20, pad_token_id=1))
    assert positions(roberta) == 18
    roberta(torch.full((1, 18), 5))
    with pytest.raises((IndexError, RuntimeError)):
        roberta(torch.full((1, 19), 5))
    llama = LlamaConfig(**small, max_position_embeddings=20)
    assert positions(LlamaForSequenceClassification(llama)) == 20


def test_a_reward_model_has_one_label(judge, toy, tmp_path):
    from grpo.extras.judges.reward_model import Classifier

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=8, num_labels=3, **sizes)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toy).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has 3 labels: it must have one"):
        Classifier(str(tmp_path))


# -- the profile


def test_the_profile_of_a_file(tmp_path):
    from grpo.extras.judges import profile as profile_rewards

    rows = [
        {"id": "a", "gold": "18", "completion": "#### 18"},
        {"id": "b", "gold": "\\frac{1}{2}", "completion": "so $\\boxed{0.5}$."},
        {"id": "c", "gold": "18", "completion": "\\boxed{17}"},
        {"id": "d", "gold": "18", "completion": "eighteen"},
        {"id": "e", "gold": "18", "completion": "\u2028\x85 \\boxed{18}"},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines.append(json.dumps({"id": "f", "gold": "18", "completion": "\\boxed{\ud800}"}))
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    command = [
        "-m", "grpo.rewards", str(tmp_path / "in.jsonl"), "--task", "gsm8k", "--out", str(tmp_path / "out.jsonl"),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["outcome"], row["reward"]) for row in out] == [
        ("a", "right", 1.1), ("b", "right", 1.1), ("c", "wrong", 0.1), ("d", "no_answer", 0.0),
        ("e", "right", 1.1), ("f", "wrong", 0.0),
    ]  # fmt: skip
    assert all(row["ms"] >= 0 for row in out)
    assert "right 3, wrong 2, no_answer 1, timeout 0, error 0" in done.stdout and "6 samples, ms each" in done.stdout

    with pytest.raises(MissingConfigException) as refused:
        profile_rewards.main([str(tmp_path / "in.jsonl"), "--task", "gsm9k"])
    assert explain(refused.value, "train").startswith("task has no option 'gsm9k'")


def most_tokens(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def test_the_profile_of_a_reward_that_needs_tokens(tmp_path, capsys):
    """A row gives them; siblings have their own. Without them one line names the column."""
    from grpo.extras.judges import profile as profile_rewards

    rows = [{"prompt": "?", "group": 1, "completion": "a", "completion_ids": [5] * n} for n in (3, 2)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *(str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--task", "jsonl"),
        *(f"task.path={tmp_path / 'in.jsonl'}", f"task.rewards={__file__}:most_tokens", "task.prompt=prompt"),
    ]
    profile_rewards.main(words)
    assert [json.loads(line)["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [3.0, 2.0]
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "?", "completion": "a"}) + "\n")
    with pytest.raises(UserError, match=r"in\.jsonl has no tokens: give each row `completion_ids`"):
        profile_rewards.main(words)


def test_one_answer_without_tokens_leaves_its_siblings_theirs():
    step = said("a").steps[0]
    none, two = (Trajectory((replace(step, action=replace(step.action, ids=ids)),)) for ids in ((), (5, 6)))
    lists = as_lists({}, [none, two])
    assert (lists["completion_ids"], lists["lengths"]) == ([[], [5, 6]], [0, 2])
    assert "completion_ids" not in as_lists({}, [none])


def test_rows_that_the_profile_reads_and_refuses(tmp_path, capsys):
    from grpo.extras.judges import profile as profile_rewards

    def written(name: str, *rows: dict) -> str:
        (tmp_path / name).write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8-sig")
        return str(tmp_path / name)

    def profiled(*arguments: str) -> str:
        profile_rewards.main(arguments)
        return capsys.readouterr().out

    odd = written(
        "odd.jsonl",
        {"gold": "18", "completion": "a\u2028b #### 18", "answer": "17"},  # its own answer, not the task's
        {"gold": None, "completion": "#### 18"},
        {"completion": "#### 18"},
    )
    assert "right 1, wrong 0, no_answer 0, timeout 0, error 2" in profiled(odd, "--task", "gsm8k")
    own = written("own.jsonl", {"question": "?", "answer": "so #### 18", "completion": "#### 18"})
    assert "right 1" in profiled(own, "--task", "gsm8k")
    task = {"prompt": "Add.", "test_imports": [], "test_list": ["assert add(1, 2) == 3"]}
    code = written("code.jsonl", task | {"completion": "def add(a, b):\n    return a + b\n"})
    assert "right 1, wrong 0" in profiled(code, "--task", "code")

    (tmp_path / "bytes.jsonl").write_bytes(b'{"gold": "1", "completion": "\xff"}\n')
    for file, task, message in [
        (str(tmp_path / "bytes.jsonl"), "gsm8k", "line 1: not a JSON object"),
        ("nowhere.jsonl", "gsm8k", "nowhere.jsonl does not exist"),
        (odd, "countdown", "needs 'numbers'"),
    ]:
        with pytest.raises(UserError, match=message):
            profile_rewards.main([file, "--task", task])


def test_a_sample_of_too_few_tokens_has_no_reward_whatever_others_say():
    rewards = Rewards(["unique_letters", partial(functions.at_least, tokens=3)], [1.0, 1.0])
    given = rewards.score({}, [said("ab", length=2), said("abc", length=3)])
    assert not given[0].known and given[1].value == 3
