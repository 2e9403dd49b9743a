"""Episodes: rows and masks of several turns, environments that fail, hang, flood or are slow, resuming."""

import asyncio
import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config, seed
from helpers.learning import as_given, fresh, make_module
from helpers.slots import Dice, Talk
from helpers.time_limits import compute, crowded, keep_for
from omegaconf import open_dict
from torch import tensor

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message, ToolCall
from grpo.env.tokens import Completion, Turn, rows_of_turns
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.models.pretrained import Pretrained
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.loss import clip, token_weights
from grpo.rollout import engine_queue
from grpo.rollout.collate import collate, scores
from grpo.rollout.episodes import play
from grpo.rollout.rollout_metrics import rollout_metrics, sample_means
from grpo.rollout.types import Limits, Sample
from grpo.runs.run import Run
from grpo.system import calls
from grpo.system.errors import RolloutError
from grpo.training.batch import RolloutBatch
from train import train


def turn(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Turn:
    return Turn(prompt, Completion(ids, tuple(-0.1 * i for i in ids), "stop"))


def sample_of(*turns: Turn, reward: float = 0.0, end="answered") -> Sample:
    step = Step(State((Message("user", "q"),)), Action(Message("assistant", "a")))
    return Sample({}, Trajectory((step,) * len(turns), end), turns, Reward(reward, False))


# The second prompt extends the first one by its completion and a tool's 9 9; the third prompt does not: a new row.
BRANCHED = (turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 9, 9), (5,)), turn((1, 2, 7), (6, 8)))


def test_three_turns_number_by_number():
    first, second = rows_of_turns(BRANCHED)
    assert (first.prompt_ids, first.ids) == ((1, 2), (3, 4, 9, 9, 5))
    assert first.sampled == (True, True, False, False, True)  # the tool's text is not learned from
    assert first.logprobs == pytest.approx((-0.3, -0.4, 0, 0, -0.5))
    assert (second.prompt_ids, second.ids, second.sampled) == ((1, 2, 7), (6, 8), (True, True))
    assert len(rows_of_turns([turn((1,), (2,)), turn((1, 2), (3,))])) == 1  # nothing in between
    assert len(rows_of_turns([turn((1,), (2, 3)), turn((1, 2), (3,))])) == 2  # shorter than the row

    groups = [[sample_of(*BRANCHED), sample_of(turn((1, 2), (3,)))]]
    batch = collate(groups, first=[4])
    assert batch.sample.tolist() == [4, 4, 5]
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 9, 9, 5], [1, 2, 7, 6, 8, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1] + [0] * 4]
    assert batch.mask.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert scores(groups).lengths.tolist() == [[5.0, 1.0]]
    assert scores([[sample_of(turn((4,), (6,)), turn((9, 4), (5, 7)))]]).last_lengths.tolist() == [[2.0]]


def test_advantages_reach_every_row_and_every_sampled_token_only():
    groups = [[sample_of(*BRANCHED, reward=1.0), sample_of(turn((1, 2), (3,)), reward=-1.0)]]
    credited = Algorithm(as_given, clip, max_tokens=4).credit(scores(groups), collate(groups))
    assert credited.advantages.tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [-1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("reduce", "branched", "other"),
    [("sequence", 1 / 10, 1 / 2), ("token", 1 / 6, 1 / 6), ("constant", 1 / 8, 1 / 8), ("sum", 1 / 2, 1 / 2)],
)
def test_a_sample_weighs_the_same_in_however_many_rows(reduce, branched, other):
    batch = collate([[sample_of(*BRANCHED), sample_of(turn((1, 2), (3,)))]])
    weights = token_weights(batch.mask, reduce, 4, batch.sample)
    expected = tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]) * branched
    expected[2, 0] = other
    torch.testing.assert_close(weights, expected)


GROUPS = [
    [sample_of(*BRANCHED), sample_of(turn((1, 2), (3, 5)))],
    [sample_of(turn((4,), (6, 7, 8))), sample_of(turn((4,), (6,)), turn((9, 4), (5,)), turn((4, 4), (7, 7)))],
]
REWARDS = tensor([[1.0, -1.0], [0.5, -0.5]])


def updated(toy, max_tokens: int, groups=GROUPS, **settings) -> dict[str, torch.Tensor]:
    policy = fresh(toy)
    module = make_module(policy, max_tokens, **settings)
    scored = scores(groups)
    batch = RolloutBatch(0, tokens=collate(groups), scores=scored)
    module.training_step(batch, 0)
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


SEQUENCE = {"level": "sequence", "surrogate": partial(clip, low=3e-4, high=4e-4)}


@pytest.mark.parametrize("settings", [{"reduce": "sequence"}, {"reduce": "sum", "num_minibatches": 2}, SEQUENCE])
def test_the_update_over_branched_episodes_does_not_depend_on_microbatches(toy, settings):
    groups = [
        [sample_of(*s.turns, reward=float(r)) for s, r in zip(group, given, strict=True)]
        for group, given in zip(GROUPS, REWARDS, strict=True)
    ]
    whole = updated(toy, 1000, groups, **settings)
    assert any(not torch.equal(whole[name], p) for name, p in fresh(toy).named_parameters())
    for size in (1, 10, 16):
        for name, p in updated(toy, size, groups, **settings).items():
            torch.testing.assert_close(p, whole[name], atol=1e-5, rtol=0)


def test_all_rows_of_a_sample_are_in_one_update(toy):
    module = make_module(fresh(toy), num_minibatches=2)
    tokens = collate(GROUPS)
    assert tokens.sample.tolist() == [0, 0, 1, 2, 3, 3, 3]
    for number in range(5):
        pieces = [p.sample.tolist() for p in module.minibatches(tokens, (2, 2), torch.Generator().manual_seed(number))]
        assert sorted(sorted(set(piece)) for piece in pieces) == [[0, 1], [2, 3]]  # whole groups
        assert sorted(pieces[0] + pieces[1]) == tokens.sample.tolist()


# -- environments


class Raising(Talk):
    def step(self, action):
        raise KeyError("the tool is gone")


class Leaving(Talk):
    def step(self, action):
        raise SystemExit(3)


class Hanging(Talk):
    def step(self, action):
        threading.Event().wait(60)


class HangingCoroutine(Talk):
    ended = None

    async def step(self, action):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            HangingCoroutine.ended = "cancelled"
            raise


HANG = (Hanging.step, HangingCoroutine.step)


class Nothing(Talk):
    def start(self):
        return None


class Babble(Talk):
    def step(self, action):
        return "not a state"


class Broken(Talk):
    def step(self, action):
        return SimpleNamespace(messages=[{"role": "user", "content": 7}])


class Async(Talk):
    async def step(self, action):
        return super().step(action)


ENVIRONMENTS = {
    "answers": lambda: Talk([]),
    "twice": lambda: Async(["and?"]),
    "endless": lambda: Talk(["go on"] * 99),
    "floods": lambda: Talk(["flood " * 170_000]),  # 1 MB
    "raises": lambda: Raising([]),
    "leaves": lambda: Leaving([]),
    "nothing": lambda: Nothing([]),
    "babbles": lambda: Babble([]),
    "broken": lambda: Broken([]),
    "hangs": lambda: Hanging([]),
    "sleeps": lambda: HangingCoroutine([]),
}


class Troubled:
    """A task whose examples are names of environments."""

    def __init__(self, names=()):
        self.names = list(names)

    def examples(self, split):
        return [{"name": name} for name in self.names]

    def build(self, example):
        if example["name"] == "unbuilt":
            raise ValueError("no such row")
        return ENVIRONMENTS[example["name"]]()

    def score(self, example, trajectory):
        assert not trajectory.failed
        return Reward(random.Random(str(trajectory.answer)).random(), correct=trajectory.end == "answered")


@pytest.mark.slow
def test_every_end_is_told_and_nobody_takes_another_along(parts, monkeypatch):
    keep_for(monkeypatch, lambda place, function, *_: getattr(function, "__func__", None) in HANG)
    names = [*ENVIRONMENTS, "unbuilt"]
    task = Troubled()
    limits = Limits(max_turns=3, step_timeout=1.0)
    groups = play(task, [{"name": name} for name in names], 2, *parts, Sampling(6, top_k=1), seed, limits)
    found = {name: group[0].trajectory for name, group in zip(names, groups, strict=True)}
    finish = {name: [t.completion.finish for t in group[0].turns] for name, group in zip(names, groups, strict=True)}
    cut = finish["answers"][-1] == "length"  # the model is random, so it may end or not
    assert {name: t.end for name, t in found.items()} == {
        "answers": "truncated" if cut else "answered",
        "twice": "truncated" if finish["twice"][-1] == "length" else "answered",
        "endless": "truncated" if finish["endless"][-1] == "length" else "out_of_turns",
        "floods": "truncated",  # it no longer fits into the model's context
        "hangs": "env_timeout",
        "sleeps": "env_timeout",
        **dict.fromkeys(["raises", "leaves", "nothing", "babbles", "broken", "unbuilt"], "env_error"),
    }
    assert {name: len(t.steps) for name, t in found.items()} == {
        **dict.fromkeys(names, 1), "twice": 2, "endless": 3, "nothing": 0, "unbuilt": 0,
    }  # fmt: skip
    assert found["raises"].error.startswith("KeyError: 'the tool is gone' (test_episodes.py, line")
    assert found["unbuilt"].error.startswith("ValueError: no such row")
    assert "NoneType" in found["nothing"].error or "None" in found["nothing"].error
    assert found["hangs"].error == "TimeoutError: it took longer than 1 s"
    assert HangingCoroutine.ended == "cancelled"
    assert len(found["floods"].last.messages[-1].content) == 1_020_000
    for sample in (sample for group in groups for sample in group):
        assert sample.reward.known != sample.trajectory.failed  # an unknown reward is not 0

    scored = scores(groups)
    metrics = rollout_metrics(groups, scored)
    assert metrics["rollout/env_error"] == 6 / 12 and metrics["rollout/env_timeout"] == 2 / 12
    assert metrics["rollout/turns"] == (6 * 1 + 2 + 3 + 2 * 0 + 1 + 1) / 12
    batch = collate(groups)
    assert set(range(24)) - set(batch.sample.tolist()) == {2 * i + s for i in (6, 11) for s in (0, 1)}  # never began


def test_a_history_that_the_chat_template_refuses_ends_its_own_episode(parts):
    engine, renderer = parts
    strict = "{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}"
    renderer.tokenizer.chat_template = strict + renderer.tokenizer.chat_template

    class Task(Troubled):
        def build(self, example):
            return Talk([example["name"]])

    groups = play(Task(), [{"name": "a"}, {"name": "b"}], 1, engine, renderer, Sampling(2), seed)
    good, refused = (group[0].trajectory for group in groups)
    assert (len(good.steps), good.failed) == (2, False)
    assert (len(refused.steps), refused.end) == (1, "env_error") and "no b" in refused.error
    assert groups[0][0].reward.known and not groups[1][0].reward.known


def test_calls_of_tools_are_counted_and_so_are_their_failures():
    said = [
        Message("assistant", "", (ToolCall("add", {"a": 1}), ToolCall("add", {}))),
        Message("assistant", "<tool_call>{", error="broken"),
        Message("assistant", "3"),
    ]
    messages, steps = (Message("user", "1 + 2?"),), []
    answers = [
        (Message("tool", "2"), Message("tool", "Error: a missing", error="a missing")),
        (Message("user", "Error"),),
        (),
    ]
    for message, answer in zip(said, answers, strict=True):
        steps.append(Step(State(messages), Action(message)))
        messages = (*messages, message, *answer)
    turns = tuple(turn((1,), (2,)) for _ in said)
    other = Sample({}, Trajectory(tuple(steps[:1]), "env_error"), turns[:1], Reward(0.0, False))
    means = sample_means([Sample({}, Trajectory(tuple(steps)), turns, Reward(0.0, False)), other])
    assert {k: means[k] for k in ("turns", "tool_calls", "tool_failures", "malformed_calls", "env_error")} == {
        "turns": 2.0, "tool_calls": 2.0, "tool_failures": 0.5, "malformed_calls": 0.5, "env_error": 0.5,
    }  # fmt: skip
    assert means["no_tool_call"] == 0.0  # there are no tools
    offered = replace(steps[2], state=replace(steps[2].state, tools=({"name": "add"},)))
    silent, calling = (Trajectory((*steps[:n], offered)) for n in (0, 2))
    means = sample_means([Sample({}, said, turns[:1], Reward(0.0, False)) for said in (silent, calling)])
    assert means["no_tool_call"] == 0.5


def test_a_slow_environment_holds_back_nobody(parts):
    """The slow one waits until the others have finished all their turns, so they must not wait for it."""
    rest, told = threading.Event(), []

    class Slow(Talk):
        def step(self, action):
            told.append(rest.wait(60))
            return super().step(action)

    class Quick(Talk):
        def step(self, action):
            state = super().step(action)
            if state is None:
                rest.set()
            return state

    class Task(Troubled):
        def build(self, example):
            return Slow(["at last"]) if example["name"] == "slow" else Quick(["a", "b", "c"])

    groups = play(Task(), [{"name": "slow"}, {"name": "quick"}], 1, *parts, Sampling(4), seed)
    assert told == [True, True] and [len(group[0].turns) for group in groups] == [2, 4]


@pytest.fixture
def sizes(parts, monkeypatch) -> list[int]:
    """The number of prompts in each call of the engine."""
    found, sample = [], parts[0].sample
    monkeypatch.setattr(
        parts[0], "sample", lambda prompts, *rest: (found.append(len(prompts)), sample(prompts, *rest))[1]
    )
    return found


def working(work, *says: str):
    """A task whose environments do `work` in each step."""

    class Task(Troubled):
        def build(self, example):
            env = Talk(list(says))
            step = env.step
            env.step = lambda action: (work(), step(action))[1]
            return env

    return Task()


def test_quick_environments_are_handed_to_the_engine_in_one_piece(parts, sizes):
    task = working(lambda: time.sleep(random.random() / 50), "a", "b")  # they are ready in any order
    play(task, [{"name": str(i)} for i in range(6)], 4, *parts, Sampling(2), seed)
    assert sizes == [24, 24, 24]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's account of threads")
def test_quick_environments_come_in_one_piece_on_a_busy_machine_too(parts, sizes):
    """Five other processes compute on the same core, so a turn of 24 environments with 20 ms of computing each takes seconds."""
    with crowded():
        play(working(lambda: compute(0.02), "a"), [{"name": str(i)} for i in range(6)], 4, *parts, Sampling(2), seed)
    assert sizes == [24, 24]


def test_slow_environments_that_answer_one_after_the_other_share_a_batch(parts, sizes, monkeypatch):
    """15 of 16 answer once they were found to be slow. By the queue's clock each asks 5 ms after the one before."""
    now, all_slow, found, order = [0.0], threading.Event(), set(), iter(range(100))
    slow, sample = calls.Calls.slow, engine_queue.EngineQueue.sample

    def looked(self, keys, others):
        given = slow(self, keys, others)
        found.update(given)
        if len(found) == 15:
            all_slow.set()
        return given

    async def asked(self, *given):
        now[0] += 0.005
        return await sample(self, *given)

    monkeypatch.setattr(engine_queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(calls.Calls, "slow", looked)
    monkeypatch.setattr(engine_queue.EngineQueue, "sample", asked)
    task = working(lambda: next(order) and all_slow.wait(60), "a")
    play(task, [{"name": str(i)} for i in range(4)], 4, *parts, Sampling(2), seed)
    assert sizes == [16, 16]


def run_of(smoke, target: str, *overrides: str, **task):
    config = compose_config(*smoke(*overrides))
    with open_dict(config):
        config.task = {"_target_": f"test_episodes.{target}", **task}
    return config


def test_dice_differ_between_samples_and_are_the_same_again(parts):
    def seen(groups):
        return [[s.trajectory.steps[1].state.messages[2].content for s in group] for group in groups]

    one, again = (seen(play(Dice(), Dice().examples("train")[:3], 6, *parts, Sampling(2), seed)) for _ in range(2))
    assert one == again and len({tuple(group) for group in one}) == 3 and all(len(set(group)) > 1 for group in one)


def test_the_samples_of_a_group_have_temperatures_in_turn(parts, sizes, monkeypatch):
    """An engine that takes them gets all prompts at once, another one a call for each; greedy samples have none."""
    sampling, examples = Sampling(2, temperatures=[0.5, 1.0, 2.0]), Dice().examples("train")[:3]

    def drawn(sampling):
        groups = play(Dice(), examples, 4, *parts, sampling, seed)
        return [[turn.completion for turn in sample.turns] for group in groups for sample in group]

    apart = drawn(sampling)  # the fixture's engine does not take them
    assert sizes[:3] == [6, 3, 3]  # of the first turn
    monkeypatch.undo()
    together = drawn(sampling)
    for one, other, temperature in zip(together, apart, [0.5, 1.0, 2.0, 0.5] * 3, strict=True):
        assert [done.ids for done in one] == [done.ids for done in other]
        assert {done.temperature for done in (*one, *other)} == {temperature}
        for mine, theirs in zip(one, other, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    greedy = drawn(replace(sampling, temperature=0.0))
    assert {done.temperature for of_sample in greedy for done in of_sample} == {None}


def metrics_of(folder):
    lines = (folder / "metrics.csv").read_text().splitlines()
    table = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "tokens/s", "memory/"))} for row in table]


@pytest.mark.slow
def test_a_run_of_several_turns_resumes_bit_exactly(smoke, tmp_path):
    def run(name, rollouts, *more):
        folder = tmp_path / name
        settings = f"""callbacks=[samples,checkpoint] output_dir={folder} rollout.num_rollouts={rollouts}
            eval.every=0""".split()
        train(run_of(smoke, "Dice", *settings, "optim.schedule.name=constant", *more))
        return folder

    whole, first = run("whole", 3), run("first", 1)
    second = run("second", 3, f"ckpt_path={first}/checkpoints/last.ckpt")
    last = [Run(folder).samples([3]) for folder in (whole, second)]
    assert last[0].equals(last[1])
    policies = [Pretrained(str(folder / "checkpoints" / "last")).model().state_dict() for folder in (whole, second)]
    assert all(torch.equal(value, policies[1][name]) for name, value in policies[0].items())


@pytest.mark.slow
def test_a_run_goes_on_past_environments_that_fail_and_its_samples_say_so(smoke, tmp_path):
    names = ["raises", "answers", "endless", "twice"]
    train(run_of(smoke, "Troubled", "callbacks=default", "rollout.prompts=4", "rollout.num_rollouts=2", names=names))
    for number in (1, 2):
        samples = Run(tmp_path).samples([number])
        failed = samples[samples["end"] == "env_error"]
        assert len(failed) == len(samples) / 4 and failed["env_error"].str.contains("the tool is gone").all()
        assert failed["reward"].isna().all() and (failed["advantage"] == 0).all()


def test_a_run_ends_where_every_environment_fails(smoke, tmp_path):
    config = run_of(smoke, "Troubled", "callbacks=default", "eval.every=0", names=["raises"] * 8)
    with pytest.raises(RolloutError) as error:
        train(config)
    assert "the environment failed in all 4 episodes; the first: KeyError: 'the tool is gone'" in str(error.value)
    assert (tmp_path / "rollouts" / "000001.failed.parquet").is_file() and "000001.failed.parquet" in str(error.value)
    assert (tmp_path / "checkpoints" / "last.ckpt").is_dir()
