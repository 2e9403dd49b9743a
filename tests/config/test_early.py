"""Mistakes that are found before torch is imported, each as the line of the run itself."""

import csv
import json
import re
import socket
import subprocess
import sys
import threading

import pandas as pd
import pytest
from conftest import EXAMPLES, ROOT, compose_config
from huggingface_hub import constants
from omegaconf import OmegaConf

from grpo.apps.pipes import quiet_pipe
from grpo.config import early
from grpo.config.explain import chain, explain
from grpo.extras.datasets.glance import columns_in
from grpo.rewards.combined import Rewards
from grpo.rewards.resolve import locate
from grpo.system.errors import UserError

MINE = """
from functools import partial

def plain(prompts, completions, **columns): return [0.0] * len(prompts)
def with_colour(completions, colour, size=1, *, shape="round", **columns): return [0.0] * len(completions)
made = partial(plain, [])

def bound(completions, limit, **columns): return [0.0] * len(completions)
bound = partial(bound, limit=5)
"""
ROWS = ["task=jsonl", f"task.path={EXAMPLES / 'train.jsonl'}", "task.prompt=question"]


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as refusal:
        early.check_early(compose_config("output_dir=.", *overrides))
    return explain(refusal.value, "train")


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_what_train_py_builds_is_needed():
    built = {name for name in re.findall(r"instantiate\(config\.(\w+)[,)]", (ROOT / "train.py").read_text())}
    assert built <= {*early.NEEDED} and {*early.NEEDED} - built == {"engine"}  # which engine_of builds


def test_the_lines_of_a_mistake(mine, tmp_path):
    assert refused("~task").startswith("~task: the run needs task")
    assert refused("task=jsonl").startswith(
        "task.path and task.rewards must have a value: give task.path=... task.rewards=..."
    )
    assert refused(*ROWS, "task.rewards=corect").startswith(
        "there is no reward function 'corect'; did you mean correct?"
    )
    assert refused(*ROWS, f"task.rewards={mine}:nope").endswith("is not there: mine has plain, with_colour, bound")
    assert "FileNotFoundError: there is no file /no/mine.py" in refused(*ROWS, "task.rewards=/no/mine.py:nope")
    assert refused(*ROWS, "task.rewards=correct") == (
        "the reward function 'correct' needs 'gold', which is no column of train (answer, question): "
        "name the column that holds the right answers, as task.gold=answer"
    )
    assert "needs 'colour', which is no column of train (answer, question) and has no" in refused(
        *ROWS, f"task.rewards={mine}:with_colour"
    )
    assert refused(*ROWS, "task.prompt=prompt", "task.rewards=longer").endswith(
        "no column 'prompt'; it has question, answer"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert "already has a run: set hydra.run.dir" in refused(f"output_dir={tmp_path / 'run'}")
    assert "already has a run" in refused(f"output_dir={tmp_path / 'run'}", f"ckpt_path={tmp_path / 'other'}")
    assert refused("algo.imitation.given=0.5").startswith(
        "algo.imitation.given=0.5, but teacher=none: take teacher=tokens"
    )


def test_rollouts_ahead_are_refused_once_with_all_that_is_missing():
    line = refused("rollout.ahead=2", "engine=transformers")
    assert line.startswith(
        "rollout.ahead=2: the samples are older than the policy, and this objective takes them as its"
    )
    assert "; and rollout.ahead=2 needs an engine with its own copy of the weights: set engine=vllm or" in line
    line = refused("rollout.ahead=2", "engine=vllm_server")
    assert "set algo.old_policy=rollout" in line and "engine" not in line
    line = refused("rollout.ahead=2", "engine=vllm_shared", "algo/correction=tis")
    assert line.startswith("rollout.ahead=2 needs an engine") and "older" not in line
    for old_policy in ("trainer", "rollout"):  # there is no ratio to compare
        bare = refused(
            "rollout.ahead=1", "algo/surrogate=reinforce", "algo.level=none", f"algo.old_policy={old_policy}"
        )
        assert "set algo/correction=tis" in bare and "old_policy" not in bare
    assert "rollout.max_staleness=1 is below rollout.ahead=2" in refused("rollout.ahead=2", "rollout.max_staleness=1")
    for fine in ("algo=topr", "algo=vespo", "algo.old_policy=rollout", "algo/correction=tis"):
        early.check_early(compose_config("output_dir=.", "rollout.ahead=1", "engine=vllm_server", fine))


def test_a_loss_without_a_reward_needs_no_reward_function(tmp_path):
    """Prompts alone are enough to distil; `best` then follows the teacher, since the accuracy is 0."""
    rows = ("output_dir=.", *ROWS, "teacher.model.path=.")
    config = compose_config(*rows, "algo=opd")
    assert early.without_grader(config).startswith("task.rewards=ungraded: no reward is in the loss")
    assert config.task.rewards == "ungraded"
    assert (config.callbacks.checkpoint.monitor, config.callbacks.checkpoint.mode) == ("teacher/divergence", "min")
    early.check_early(config)
    assert locate("ungraded")(["a", "b"]) == [0.0, 0.0]
    for reads in (["algo=opd", "algo.policy_coef=1"], ["algo=opd", "selection=dynamic"], ["algo=sdpo"], ["algo=grpo"]):
        words = [word for word in rows if reads[0] == "algo=opd" or "teacher" not in word]
        config = compose_config(*words, *reads)
        assert early.without_grader(config) == "" and OmegaConf.is_missing(config.task, "rewards")
    config = compose_config(*rows, "algo=opd", "task.rewards=longer")
    assert early.without_grader(config) == "" and config.task.rewards == "longer"


def test_a_model_and_rows_that_are_nowhere_are_named_together(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    early.no_hub.cache_clear()
    line = refused("model=path", "model.path=org/no_such_model", "task=gsm8k", "task.path=org/no_such_rows")
    assert line.startswith(
        "model.path=org/no_such_model is neither a local folder nor a model that the hub gives (HF_HUB_OFFLINE=1"
    )
    assert "; task.path=org/no_such_rows is no folder of this machine, and the hub does not give it (HF_HUB" in line
    assert line.endswith("python -m grpo.prefetch with these arguments fetches both")
    line = refused(
        "model=path", "model.path=org/no_such_model", "task.path=org/no_such_rows", "debug=forecast", "task=gsm8k"
    )
    assert "task.path" not in line  # a forecast makes rows up
    assert "give a folder that exists" in refused("model=path", "model.path=/no/folder")
    assert "task.path=nowhere does not exist" in refused("task=gsm8k", "task.path=nowhere")
    early.no_hub.cache_clear()


def test_what_is_on_this_machine_or_may_come_from_the_hub_is_not_refused(monkeypatch, tmp_path, mine):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    early.no_hub.cache_clear()
    (tmp_path / "models--org--name").mkdir()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "Org___my_rows").mkdir()
    early.check_early(compose_config("output_dir=.", "task=gsm8k", "task.path=Org/MyRows"))
    (tmp_path / "datasets--org--rows").mkdir()
    cached = ("model=path", "model.path=org/name", "task=gsm8k", "task.path=org/rows")
    early.check_early(compose_config("output_dir=.", *cached))
    early.check_early(
        compose_config(
            "output_dir=.", *ROWS, "task.gold=answer", f"task.rewards=[correct,{mine}:made,{mine}:bound,os.getcwd]"
        )
    )
    early.no_hub.cache_clear()


def test_it_says_what_the_run_would_say(mine):
    """The rules about reward functions stand in rewards/, and both ways lead to them."""
    for name in ("corect", f"{mine}:nope"):
        with pytest.raises(UserError) as refusal:
            locate(name)
        words = str(refusal.value).partition("; did you mean")[0].partition(": mine has")[0]
        assert refused(*ROWS, f"task.rewards={name}").startswith(words)
    with pytest.raises(UserError) as refusal:
        Rewards("correct").check({"question", "answer"}, "train")
    assert refused(*ROWS, "task.rewards=correct") == str(refusal.value)


def test_a_circle_of_causes_ends():
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__context__ = second, first
    assert [*chain(first)] == [first, second]


def test_columns_of_a_file_without_its_rows(tmp_path):
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y", "c": "only here"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[], [" "], ["a", "b"], [1, "x"]])  # pandas passes over the first two
    pd.DataFrame(rows[:1]).to_parquet(tmp_path / "rows.parquet")
    for kind, later in (("jsonl", True), ("json", True), ("csv", False), ("parquet", False)):
        names, may_have = columns_in(tmp_path / f"rows.{kind}")
        assert (names, may_have("b"), may_have("c"), may_have("d")) == (["a", "b"], True, later, False), kind
    (tmp_path / "rows.jsonl").write_text('{"größe": 1}\n', encoding="utf-8")
    names, may_have = columns_in(tmp_path / "rows.jsonl")
    assert (names, may_have("größe"), may_have("grösse")) == (["größe"], True, False)


@pytest.mark.parametrize("words", ["train.py --help", "-m grpo.report --help"])
@pytest.mark.slow
def test_a_program_whose_reader_has_gone_ends_in_silence(words):
    """As after `| head -1`: the pipe is closed before the program has written."""
    program = subprocess.Popen(
        [sys.executable, *words.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    program.stdout.close()
    assert program.stderr.read() == "" and program.wait(120) in (0, 141)


def test_a_connection_that_is_lost_is_no_closed_terminal(capsys):
    with pytest.raises(BrokenPipeError), quiet_pipe():
        raise BrokenPipeError(32, "of a server")


@pytest.mark.slow
def test_none_of_it_imports_torch(tmp_path):
    words = [
        sys.executable,
        "-X",
        "importtime",
        "train.py",
        *ROWS,
        "task.rewards=correct",
        f"hydra.run.dir={tmp_path}/run",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.stderr.splitlines()[-1].startswith("error: the reward function 'correct' needs 'gold'")
    assert "grpo.config.early" in imported and not imported & {"torch", "lightning", "transformers", "datasets"}


def test_a_hub_that_answers_is_there_and_one_that_does_not_is_not(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        answer = threading.Thread(target=refuses_once, args=[listener])
        answer.start()
        early.no_hub.cache_clear()
        assert early.no_hub() == ""
        answer.join()
    early.no_hub.cache_clear()
    assert early.no_hub().startswith(f"{constants.ENDPOINT} does not answer: ")
    early.no_hub.cache_clear()


def refuses_once(listener: socket.socket) -> None:
    """Answer one request with a status that refuses it."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
