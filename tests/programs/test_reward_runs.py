"""Runs with a user's own rewards and tasks: files after a failure, messages for mistakes, sources kept apart."""

import math
import subprocess
import sys

import pandas as pd
import pytest
from conftest import EXAMPLES, REAL_DATA, ROOT, compose_config
from helpers.runs import rows, told
from helpers.time_limits import keep_for

from grpo.runs.run import Run
from tasks.gsm8k import GSM8K
from train import train

BURNS = """
def brevity(completions, question, **columns):
    if any("lamps" in text for text in question) and "think" not in completions[0]:  # no made-up answer
        raise RuntimeError("judge is down")
    return [-len(text) / 100 for text in completions]
"""


def test_a_reward_that_fails_leaves_what_was_played(smoke, tmp_path):
    (tmp_path / "mine.py").write_text(BURNS)
    settings = (f"task.rewards={tmp_path}/mine.py:brevity", "task.weights=null", f"output_dir={tmp_path / 'run'}")
    line = told(*smoke(*settings, "eval.every=0", "rollout.prompts=4"))
    assert "the reward function 'brevity' raised RuntimeError: judge is down (mine.py, line 4)" in line
    file = tmp_path / "run" / "rollouts" / "000001.failed.parquet"
    assert str(file) in line and "sample 0" in line
    left = pd.read_parquet(file).to_dict("records")
    place = int(line.partition("prompt_index ")[2].partition(",")[0])
    assert len(left) == 8 and "lamps" in left[2 * place]["prompt"]
    assert [math.isnan(row["reward"]) for row in left] == [row["prompt_index"] == place for row in left]


@pytest.mark.slow
def test_a_run_whose_reward_failed_goes_on_where_it_was(smoke, tmp_path):
    """The judge fails in rollout 3 and is repaired; the rest is as if nothing had happened."""
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
    assert "OSError: the judge is down" in told(*smoke(*settings, f"output_dir={tmp_path / 'a'}"))
    assert len(rows(tmp_path / "a")) == 2
    (tmp_path / "down").unlink()
    for name, more in (("b", [f"ckpt_path={tmp_path / 'a' / 'checkpoints' / 'last.ckpt'}"]), ("c", [])):
        train(compose_config(*smoke(*settings, f"output_dir={tmp_path / name}", *more)))
    assert rows(tmp_path / "b") == rows(tmp_path / "c")[2:] and rows(tmp_path / "c")[3]["loss/grad_norm"] > 0


def test_timeouts_are_counted_and_left_out(smoke, tmp_path, monkeypatch):
    keep_for(monkeypatch, lambda key, function, *args: key == "trial" or "lamps" in str(args[1:2]))
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completions, question, **columns):\n"
        "    time.sleep(3600 if 'lamps' in question[0] else 0)\n"
        "    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
    )
    settings = (f"task.rewards={tmp_path}/slow.py:slow", "task.weights=null", "eval.every=0", "score_timeout=1")
    train(compose_config(*smoke(*settings, "rollout.prompts=4", "callbacks=[samples]", "rollout.num_rollouts=1")))
    (row,) = rows(tmp_path)
    assert row["rollout/timeout"] == 0.25
    assert row["data/epoch"] == 1.0 and row["data/prompts"] == 4 and row["loss/grad_norm"] > 0
    samples = Run(tmp_path).samples()
    lost = samples[samples["reward"].isna()]
    assert (
        len(samples) == 8 and len(lost) == 2 and set(lost["outcome"]) == {"timeout"} and set(lost["advantage"]) == {0}
    )


def test_a_reward_that_seeds_every_generator_changes_nothing(smoke, tmp_path):
    value = "    return [sum(text.encode()) % 97 / 97 for text in completions]\n"
    seeds = "    torch.manual_seed(0), random.seed(0), np.random.seed(0)\n"
    for name, body in (("plain", ""), ("seeds", seeds)):
        (tmp_path / f"{name}.py").write_text(
            f"import random\nimport numpy as np\nimport torch\n\ndef mine(completions, **columns):\n{body}{value}"
        )
        reward = (f"task.rewards={tmp_path}/{name}.py:mine", "task.weights=null", f"output_dir={tmp_path / name}")
        train(compose_config(*smoke(*reward, "eval.every=0")))
    assert rows(tmp_path / "plain") == rows(tmp_path / "seeds") and rows(tmp_path / "seeds")[1]["loss/grad_norm"] > 0


@pytest.mark.parametrize(
    ("last", "line"),
    [
        ("os.abort()", 'File "<string>", line 7 in mine'),
        (
            "threading.Thread(target=os._exit, args=(0,)).start(); threading.Event().wait()",
            "error: os._exit was called while the reward function 'mine' ran\n",
        ),
        ("sys.exit()", ""),
    ],
)
def test_a_function_that_ends_the_process_is_named(last, line):
    """As in a run: the function runs in a thread."""
    code = "import os, sys, threading\nfrom grpo.system import exits\nexits.watch()\n"
    code += "def call():\n    with exits.seen('the reward function \\'mine\\''): mine()\n"
    code += f"def mine():\n    {last}\n"
    code += "thread = threading.Thread(target=call)\nthread.start(), thread.join()\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert line in done.stderr and bool(done.stderr) == bool(done.returncode) == bool(line)


def test_a_function_that_leaves_the_process_fails_the_run():
    """With exit code 0 the run would seem to have finished."""
    code = "import os\nfrom grpo.system import exits\nfrom grpo.rewards.combined import Rewards\n"
    code += "from grpo.env.types import Trajectory\nexits.watch()\ndef mine(completions): os._exit(0)\n"
    code += (
        "try: Rewards(mine)._called({'completions': ['a']}, {})\nexcept Exception as error: print(error, flush=True)\n"
    )
    code += "if not os.fork(): os._exit(0)\nassert os.wait()[1] == 0\nos._exit(7)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("the reward function 'mine' raised SystemExit: it called os._exit(0)")
    assert done.returncode == 7 and done.stderr == ""


# -- as a user


TASK = '''
"""Say a short word."""
from grpo.env.messages import Message
from grpo.env.types import Reward, SingleTurn


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


@pytest.mark.slow
def test_a_task_and_a_reward_from_outside_the_repository(toy, tmp_path, monkeypatch):
    """A folder with a task, its YAML and a reward, which the repository does not know."""
    outside = tmp_path / "mine"
    (outside / "conf" / "task").mkdir(parents=True)
    (outside / "short_words.py").write_text(TASK)
    (outside / "conf" / "task" / "short.yaml").write_text(
        "# @package _global_\ntask: {_target_: short_words.Short, words: [one, two, three, four]}\nmax_tokens: 5\n"
    )
    (outside / "my_rewards.py").write_text(
        "def vowels(completions, **_):\n    return [t.count('e') for t in completions]\n"
    )
    model = ("model=path", f"model.path={toy}", "debug=smoke", "preflight=off", "trainer=cpu", "callbacks=[samples]")
    monkeypatch.syspath_prepend(outside)
    found = f"hydra.searchpath=[file://{outside}/conf]"
    train(compose_config("task=short", found, *model, f"output_dir={tmp_path}/a"))
    assert len(rows(tmp_path / "a")) == 3 and rows(tmp_path / "a")[1]["rollout/reward"] < 0
    more = f"""task.path={EXAMPLES} task.prompt=question task.rewards=[my_rewards.vowels,longer]
        task.weights=[1,0.5]""".split()
    train(compose_config("task=jsonl", *more, *model, "max_tokens=5", f"output_dir={tmp_path}/b"))
    row = rows(tmp_path / "b")[1]
    assert row["rollout/reward"] == pytest.approx(row["rollout/vowels"] + 0.5 * row["rollout/longer"])


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


@pytest.mark.slow
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
