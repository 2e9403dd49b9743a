"""Rewards on their way into a run: in threads, with a limit, and nothing lost when one fails."""

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import EXAMPLES, REAL_DATA, ROOT, compose_config
from test_train import rows, told

from grpo.collate import collate, scores
from grpo.engine import Sampling
from grpo.engines.transformers import TransformersEngine
from grpo.messages import Message
from grpo.policy import Pretrained
from grpo.renderer import TokenizerRenderer
from grpo.rewards import Rewards
from grpo.rl import Action, Reward, SingleTurn, State, Step, Trajectory
from grpo.rollout import derive_seed, play
from grpo.scoring import THREADS, Scoring, score_group
from tasks.gsm8k import GSM8K
from train import train


def said(text: str) -> Trajectory:
    return Trajectory((Step(State(()), Action(Message("assistant", text))),))


class Echo:
    """Scores a text as a number; `hang` never comes back and `burn` raises."""

    def build(self, example):
        return SingleTurn((Message("user", str(example)),))

    def score(self, example, trajectory):
        if trajectory.answer == "hang":
            threading.Event().wait()
        if trajectory.answer == "burn":
            raise OSError("no network")
        return Reward(float(trajectory.answer), correct=False)


class GroupEcho(Echo):
    """The same of a whole group: each sample is compared with the best of its siblings."""

    async def score_group(self, example, trajectories):
        await asyncio.sleep(0)
        values = [self.score(example, trajectory).value for trajectory in trajectories]
        return [Reward(value - max(values), correct=False) for value in values]


class Patient(GroupEcho):
    """One that hangs as a coroutine should, leaving the others alone."""

    async def score_group(self, example, trajectories):
        if any(trajectory.answer == "hang" for trajectory in trajectories):
            await asyncio.sleep(3600)
        return await super().score_group(example, trajectories)


def finish(task, *groups, timeout=0.3):
    scoring = Scoring(task, timeout)
    for place, group in enumerate(groups):
        scoring.start(place, {}, [said(text) for text in group])
    rewards, errors = scoring.finish()
    return {p: [r.value for r in found] for p, found in rewards.items()}, errors


def test_groups_are_scored_whole_or_sample_by_sample():
    assert finish(Echo(), ["1", "2"], ["3", "4"]) == ({0: [1, 2], 1: [3, 4]}, {})
    assert finish(GroupEcho(), ["1", "2"], ["7", "4"]) == ({0: [-1, 0], 1: [0, -3]}, {})

    class Mine(GroupEcho):
        def score(self, example, trajectory):
            return Reward(9.0, correct=False)

    assert [r.value for r in score_group(Mine(), {}, [said("1")])] == [9.0]  # the last word, not an inherited one


def test_a_call_that_hangs_is_given_up_and_its_siblings_are_not():
    rewards, errors = finish(Echo(), ["1", "hang", "3"], ["hang", "hang"], ["6"])
    assert rewards[2] == [6] and not errors
    assert [value if value == value else None for value in rewards[0]] == [1, None, 3]
    assert all(map(math.isnan, rewards[1]))
    rewards, errors = finish(Patient(), ["1", "hang"], ["5"])  # one call for both: nobody knows either
    assert all(map(math.isnan, rewards[0])) and rewards[1] == [0] and not errors
    finish(GroupEcho(), ["1", "hang"])  # blocks the loop of all coroutines, which get another one
    assert finish(GroupEcho(), ["1", "2"]) == ({0: [-1, 0]}, {})


def test_more_that_hang_than_there_are_threads():
    rewards, errors = finish(Echo(), ["1"], *[["hang"]] * (2 * THREADS), ["2"], timeout=0.1)
    assert rewards[0] == [1] and rewards[2 * THREADS + 1] == [2] and not errors
    assert all(map(math.isnan, rewards[5]))


def test_a_reward_that_never_comes_back_is_broken():
    """A judge that is down costs the limit once, not once for every sixteen prompts."""
    _, errors = finish(Echo(), *[["hang"] * 2] * (4 * THREADS), timeout=0.1)
    (error,) = errors.values()
    assert "Echo.score did not come back in 0.1 s" in str(
        error
    ) and "never once: mend it, or raise score_timeout" in str(error)


def test_coroutines_share_a_loop():
    """So that a client which belongs to a loop can be made once."""
    loops = set()

    class Client(Echo):
        async def score(self, example, trajectory):
            loops.add(asyncio.get_running_loop())
            return Reward(1.0, correct=True)

    async def judge(completions, **columns):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    finish(Client(), ["a", "b"], ["c"])
    Rewards(judge).score({}, [said("a")])
    assert len(loops) == 1


def test_calls_that_hang_are_given_up_side_by_side():
    started = time.monotonic()
    rewards, _ = finish(Echo(), *[["hang"] * 4] * 6, timeout=0.3)
    assert (
        all(math.isnan(value) for found in rewards.values() for value in found) and time.monotonic() - started < 3
    )  # one by one: 7.2


def test_what_was_given_up_cannot_fail_any_more():
    class Late(Echo):
        def score(self, example, trajectory):
            time.sleep(float(trajectory.answer))
            if trajectory.answer == "0.5":
                raise OSError("late")
            return Reward(1.0, correct=True)

    rewards, errors = finish(Late(), ["0.5"], ["0.2"] * 4)
    assert math.isnan(rewards[0][0]) and rewards[1] == [1] * 4 and not errors


def test_a_failure_stays_one_while_its_sample_is_looked_for():
    class Slow(Echo):
        def score_group(self, example, trajectories):
            time.sleep(0.2)
            if len(trajectories) > 1 or trajectories[0].answer == "bad":
                raise OSError("no network")
            return [Reward(0.0, correct=False)]

    _, errors = finish(Slow(), ["1", "2", "3", "bad"])
    assert errors[0].sample is None and "no network" in str(errors[0])


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda: 0.5, "Odd.score gave 0.5: it must give a grpo.rl.Reward"),
        (lambda: None, "Odd.score gave None"),
        (lambda: Reward(math.inf, True), "Odd.score gave a reward of inf: it must be finite"),
        (lambda: sys.exit(3), "Odd.score raised SystemExit: 3"),
    ],
)
def test_what_a_task_gives_is_a_reward(gives, message):
    class Odd(Echo):
        def score(self, example, trajectory):
            return Reward(1.0, True) if trajectory.answer == "good" else gives()

    started = time.monotonic()
    _, errors = finish(Odd(), ["good", "odd"], timeout=20)
    assert message in str(errors[0]) and errors[0].sample == 1 and time.monotonic() - started < 5


def test_rewards_become_numbers_that_can_be_written():
    class Arrays(Echo):
        def score(self, example, trajectory):
            return Reward(np.float32(0.5), np.bool_(True), {"a": np.float32(2)})

    (reward,) = score_group(Arrays(), {}, [said("1")])
    assert json.loads(json.dumps([reward.value, reward.correct, reward.parts])) == [0.5, True, {"a": 2.0}]


def test_what_raises_is_named_with_its_sample():
    for task, name in ((Echo(), "Echo.score"), (GroupEcho(), "GroupEcho.score_group")):
        rewards, errors = finish(task, ["1", "2"], ["3", "burn"])
        assert list(errors) == [1] and errors[1].sample == 1 and len(rewards[0]) == 2
        assert str(errors[1]).startswith(f"{name} raised OSError: no network (test_scoring.py, line ")

    class Short(Echo):
        def score_group(self, example, trajectories):
            return []

    assert "score_group gave 0 rewards for 2 samples" in str(finish(Short(), ["1", "2"])[1][0])


def test_rewards_come_while_others_are_still_generating(toy, toy_model):
    """Prompt 0 gets one token to say, prompt 1 four: the first is scored before the second one has been sampled."""
    engine = TransformersEngine(max_rows=2)
    engine.load_weights(toy_model, 0)
    renderer = TokenizerRenderer(Pretrained(str(toy)).tokenizer())
    order, first = [], threading.Event()

    class Told(Echo):
        def score(self, example, trajectory):
            order.append(f"scored {example}")
            first.set()
            return Reward(float(example), correct=False)

    class Watched:
        def sample(self, prompts, sampling, seeds, done):
            found = engine.sample(prompts[:2], sampling, seeds[:2], done)
            assert first.wait(10)
            order.append("sampled the rest")
            return found + engine.sample(prompts[2:], sampling, seeds[2:])  # does not tell of each

    groups = play(Told(), [0, 1], 2, Watched(), renderer, Sampling(4), lambda *path: derive_seed(0, *path))
    assert order == ["scored 0", "scored 0", "sampled the rest", "scored 1", "scored 1"]
    assert [[sample.reward.value for sample in group] for group in groups] == [[0, 0], [1, 1]]
    assert scores(groups).rewards.tolist() == [[0, 0], [1, 1]] and len(collate(groups)) == 4


def test_an_engine_tells_of_each_completion_once(toy, toy_model):
    engine, heard = TransformersEngine(max_rows=3), {}
    engine.load_weights(toy_model, 0)
    prompts, seeds = [(5, 6), (5, 6), (7,), (8, 9), (7,)], [1, 2, 3, 4, 5]
    found = engine.sample(prompts, Sampling(12), seeds, lambda i, completion: heard.update({i: completion}))
    assert [heard[i] for i in range(5)] == found and len(heard) == 5
    assert found == engine.sample(prompts, Sampling(12), seeds)


BURNS = """
def brevity(completions, question, **columns):
    if any("lamps" in text for text in question):
        raise RuntimeError("judge is down")
    return [-len(text) / 100 for text in completions]
"""


def test_a_reward_that_fails_leaves_what_was_played(smoke, tmp_path):
    (tmp_path / "mine.py").write_text(BURNS)
    (tmp_path / "run").mkdir()
    settings = (f"task.rewards={tmp_path}/mine.py:brevity", "task.weights=null", f"output_dir={tmp_path / 'run'}")
    line = told(*smoke(*settings, "eval.every=0", "rollout.prompts=4"))
    assert "the reward function 'brevity' raised RuntimeError: judge is down (mine.py, line 4)" in line
    file = tmp_path / "run" / "rollouts" / "000001.failed.jsonl"
    assert str(file) in line and "sample 0" in line
    left = [json.loads(text) for text in file.read_text().splitlines()]
    place = int(line.partition("prompt_index ")[2].partition(",")[0])
    assert len(left) == 8 and "lamps" in left[2 * place]["messages"][0]["content"]
    assert [row["reward"] is None for row in left] == [row["prompt_index"] == place for row in left]


def test_a_run_whose_reward_failed_goes_on_where_it_was(smoke, tmp_path):
    """The judge is down in rollout 3, mended, and the rest is as if nothing had happened."""
    judge = (
        "from pathlib import Path\n\ndef judge(completions, **columns):\n"
        "    if (Path(__file__).parent / 'down').exists() and len(list(Path(__file__).parent.glob('*/rollouts/*'))) == 2:\n"
        "        raise OSError('the judge is down')\n"
        "    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
    )
    (tmp_path / "mine.py").write_text(judge)
    settings = (f"task.rewards={tmp_path}/mine.py:judge", "task.weights=null", "callbacks=[samples,checkpoint]")
    settings = (*settings, "rollout.num_rollouts=4", "eval.every=0")

    (tmp_path / "down").touch()
    (tmp_path / "a").mkdir()
    assert "OSError: the judge is down" in told(*smoke(*settings, f"output_dir={tmp_path / 'a'}"))
    assert len(rows(tmp_path / "a")) == 2
    (tmp_path / "down").unlink()
    for name, more in (("b", [f"ckpt_path={tmp_path / 'a' / 'checkpoints' / 'last.ckpt'}"]), ("c", [])):
        (tmp_path / name).mkdir()
        train(compose_config(*smoke(*settings, f"output_dir={tmp_path / name}", *more)))
    assert rows(tmp_path / "b") == rows(tmp_path / "c")[2:] and rows(tmp_path / "c")[3]["loss/grad_norm"] > 0


def test_timeouts_are_counted_and_left_out(smoke, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completions, question, **columns):\n"
        "    time.sleep(30 if 'lamps' in question[0] else 0)\n"
        "    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
    )
    settings = (f"task.rewards={tmp_path}/slow.py:slow", "task.weights=null", "eval.every=0", "score_timeout=1")
    started = time.monotonic()
    train(compose_config(*smoke(*settings, "rollout.prompts=4", "callbacks=[samples]", "rollout.num_rollouts=1")))
    (row,) = rows(tmp_path)
    assert row["rollout/timeout"] == 0.25
    assert row["data/epoch"] == 1.0 and row["data/prompts"] == 4 and row["loss/grad_norm"] > 0
    lost = [json.loads(text) for text in (tmp_path / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert sorted(sample["reward"] is None for sample in lost) == [False] * 6 + [True] * 2
    assert all((s["advantage"], s["outcome"]) == (0, "timeout") for s in lost if s["reward"] is None)
    assert time.monotonic() - started < 25


# -- as a user


def run(*overrides: str, path: str = "") -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "train.py", *overrides]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


TASK = '''
"""Say a short word."""
from grpo.messages import Message
from grpo.rl import Reward, SingleTurn


class Short:
    def __init__(self, words):
        self.words = words

    def examples(self, split):
        return [{"word": word} for word in self.words]

    def build(self, example):
        return SingleTurn((Message("user", example["word"]),))

    def score(self, example, trajectory):
        return Reward(-float(len(trajectory.answer)), correct=len(trajectory.answer) < 4)
'''


def test_a_task_and_a_reward_from_outside_the_repository(toy, tmp_path):
    """A folder with a task, its YAML and a reward; nothing in the repository knows of it."""
    outside = tmp_path / "mine"
    (outside / "conf" / "task").mkdir(parents=True)
    (outside / "short_words.py").write_text(TASK)
    (outside / "conf" / "task" / "short.yaml").write_text(
        "# @package _global_\ntask: {_target_: short_words.Short, words: [one, two, three, four]}\nmax_tokens: 5\n"
    )
    (outside / "my_rewards.py").write_text(
        "def vowels(completions, **_):\n    return [t.count('e') for t in completions]\n"
    )
    model = ("model=path", f"model.path={toy}", "debug=smoke", "trainer=cpu", "callbacks=[samples]")
    done = run(
        "task=short",
        f"hydra.searchpath=[file://{outside}/conf]",
        *model,
        f"hydra.run.dir={tmp_path}/a",
        path=str(outside),
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "a")) == 3 and rows(tmp_path / "a")[1]["rollout/reward"] < 0
    more = (
        f"task.path={EXAMPLES}",
        "task.prompt=question",
        "task.rewards=[my_rewards.vowels,longer]",
        "task.weights=[1,0.5]",
    )
    done = run("task=jsonl", *more, *model, "max_tokens=5", f"hydra.run.dir={tmp_path}/b", path=str(outside))
    assert done.returncode == 0, done.stderr
    row = rows(tmp_path / "b")[1]
    assert row["rollout/reward"] == pytest.approx(row["rollout/vowels"] + 0.5 * row["rollout/longer"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.weights=[1,2,3]"], "number of reward weights (3) must match number of reward functions (2)"),
        (["task.rewards=[nothing.at.all]", "task.weights=null"], "'nothing.at.all' cannot be imported"),
        (["task.rewards=[{_target_: nothing.at.all, _partial_: true}]"], "nothing"),
        (["task.rewards=rewards/mine.py", "task.weights=null"], "is a file: say which of its functions"),
        (["eval.split=validation"], "there is no split 'validation'"),
        (["eval.split=dev"], "eval.split=dev is not one of train, validation, test"),
        (["task.filters=[long]"], "task.filters has 'long'"),
        (["score_timeout=0"], "score_timeout=0 must be more than 0"),
        (["prompt_limit.too_long=cut"], "prompt_limit.too_long=cut is not one of refuse, drop, truncate"),
        (["prompt_limit={max_tokens: 3, too_long: drop}"], "removes all 4 examples"),
        (["model.chat_template=nowhere.jinja"], "model.chat_template=nowhere.jinja is not a file"),
        (["task=jsonl", "task.rewards=longer"], "no column 'prompt'; it has question, answer"),
        (["task=jsonl"], "task.rewards"),
    ],
)
def test_mistakes_with_tasks_and_rewards_are_told_in_one_line(smoke, overrides, message):
    assert message in told(*smoke(*overrides))


def test_a_function_with_the_name_of_a_metric_leaves_it_alone(smoke, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def accuracy(completions, **_):\n    return [7.0 for _ in completions]\n\n"
        "def length(completions, **_):\n    return [-3.0 for _ in completions]\n"
    )
    functions = f"task.rewards=[correct,{tmp_path}/mine.py:accuracy,{tmp_path}/mine.py:length]"
    train(compose_config(*smoke(functions, "task.weights=[1,0,1]")))
    first, second, *_ = rows(tmp_path)
    assert first["eval/accuracy"] == 0 and first["eval/mine.accuracy"] == 7 and first["eval/length"] > 0
    assert second["rollout/length"] > 0 and second["rollout/mine.length"] == -3 == second["rollout/reward"]


def test_a_run_of_a_mixture_tells_its_sources_apart(smoke, tmp_path):
    task = GSM8K(str(EXAMPLES))
    assert len(task.examples("train")) == 4
    overrides = [o for o in smoke() if not o.startswith("task")]
    path = f"task.sources.gsm8k.task.path={REAL_DATA if REAL_DATA.is_dir() else EXAMPLES}"
    sizes = "task.sources.countdown.task.sizes.test=3"
    config = compose_config("task=mixture", path, sizes, *overrides, "rollout.prompts=6", "eval.limit=6")
    train(config)
    table = rows(tmp_path)
    assert {"eval/gsm8k/correct", "eval/countdown/correct"} <= table[0].keys()
    assert {"rollout/gsm8k/reward", "rollout/countdown/reward", "rollout/no_answer"} <= table[1].keys()
