"""source=atropos against a stand-in of the run-api that follows its protocol, and against the real one where it is installed.

GRPO_TEST_ATROPOS names an environment of Python with atroposlib; without it, that of the tests.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from conftest import ROOT, preset
from parity.run_api import Environment, RunApi, post

import grpo
from grpo.engines.protocol import Sampling
from grpo.extras.serve.sources.atropos import Atropos, samples_of
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Plan
from grpo.system.errors import RolloutError

REAL = Path(os.environ.get("GRPO_TEST_ATROPOS", sys.prefix), "bin")


def until(true) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def trainer(parts, toy, api, prompts=2, timeout=120.0, tmp="."):
    """The source and the rollouts of a run that waits for batches of `prompts` groups of four, on the built-in engine."""
    engine, renderer = parts
    source = Atropos(Pretrained(str(toy)), renderer, api.url, free_port(), timeout)
    plan = Plan(prompts, 4, 9, Sampling(6))
    try:
        yield source, Rollouts(plan, None, source, engine, renderer, preset("algo=grpo"), tmp, 0)
    finally:
        source.close()


@contextmanager
def environment(source, api, **settings):
    env = Environment(api, f"http://127.0.0.1:{source.port}", **settings)
    try:
        yield env
    finally:
        env.over = True
        with source.served.open():  # answers the request that it waits for
            env.join(60)


def test_batches_become_rollouts_with_known_versions_and_log_probabilities(parts, toy, toy_model):
    api = RunApi()
    with trainer(parts, toy, api) as (source, rollouts), environment(source, api):
        first = rollouts.make(0)
        assert [len(group) for group in first.groups] == [4, 4] and source.metrics == {"rollout/staleness": 0.0}
        assert api.config | {"checkpoint_dir": ""} == {
            "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": Pretrained(str(toy)).context(),
            "starting_step": 0, "checkpoint_dir": "", "save_checkpoint_interval": 0, "num_steps": 18,
        }  # fmt: skip
        for sample in (sample for group in first.groups for sample in group):
            [turn] = sample.turns
            assert len(turn.prompt_ids) == 3 and turn.completion.versions == (0,) * len(turn.completion.ids)
            assert sample.reward.value == sum(i < 150 for i in turn.completion.ids)
            assert sample.reward.extra == {"versions": [0]} and sample.trajectory.truncated == (
                turn.completion.finish == "length"
            )
        with source.served.open():
            until(lambda: len(api.queue) + len(api.ready) >= 4)
        source.served.engine.load_weights(toy_model, 1)
        ages = [rollouts.make(1) and source.metrics["rollout/staleness"] for _ in range(6)]
        assert ages[0] == 1 and 0 in ages  # groups of version 0 were in the queue, and the newest batch comes first
        # nothing is sampled during an update, and a route that would change weights is closed
        before = source.served.answered
        time.sleep(0.3)
        assert source.served.answered == before and source.served.batching.paused
        with pytest.raises(OSError, match="404"):
            post(f"{source.served.url}/reload_weights", {})


def test_a_restart_of_the_run_api_and_another_batch_size(parts, toy, caplog):
    api = RunApi()
    api.answer("/register", dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "") | dict.fromkeys(
        ("batch_size", "max_token_len", "starting_step", "save_checkpoint_interval", "num_steps"), 6))  # fmt: skip
    with trainer(parts, toy, api) as (source, rollouts), environment(source, api):
        assert len(rollouts.make(0).groups) == 2
        assert api.calls[:4] == ["/register", "/info", "/reset_data", "/register"] and api.config["batch_size"] == 8
        assert "has lost this run or has another one: restart its environments" in caplog.text
        api.forget()
        api.calls.clear()
        assert len(rollouts.make(5).groups) == 2
        assert api.calls[:2] == ["/info", "/register"] and api.config["starting_step"] == 5


def test_an_odd_group_starves_the_queue_and_a_dead_environment_ends_the_run(parts, toy, caplog, monkeypatch):
    api = RunApi()
    monkeypatch.setattr("grpo.extras.serve.sources.atropos.SEEN", 2)
    with trainer(parts, toy, api, timeout=1.0) as (_, rollouts):
        with pytest.raises(
            RolloutError, match=r"no environment has sent or asked anything for 1 s \(0 groups wait at .* --openai"
        ):
            rollouts.make(0)
        api.queue += [{"tokens": [[1, 2]] * 5, "masks": [], "scores": []} for _ in range(8)]
        with pytest.raises(RolloutError, match=r"\(8 groups wait at"):
            rollouts.make(0)
        assert "8 groups wait at" in caplog.text and "every group_size must divide rollout.prompts" in caplog.text
    api.server.shutdown()
    monkeypatch.setattr("grpo.extras.serve.sources.atropos.START", 0.5)
    api.server.server_close()
    with trainer(parts, toy, api) as (_, rollouts), pytest.raises(RolloutError, match="Atropos API not reachable at"):
        rollouts.make(0)


def test_a_batch_that_cannot_be_read_is_one_line(parts, toy, monkeypatch):
    api, odd = RunApi(), iter([["x"], {"batch": [{"scores": [1.0]}]}, {"batch": 3}])
    known = {"/info": {"batch_size": -1}, "/register": {"uuid": 1}, "/status": {"queue_size": None}}
    monkeypatch.setattr(api, "answer", lambda path, body: (200, known[path] if path in known else next(odd)))
    with trainer(parts, toy, api) as (_, rollouts):
        for line in (r"without 'tokens': \[\{\"scores\": \[1\.0\]\}\]", "answers what cannot be read: 3"):
            with pytest.raises(RolloutError, match=f"{api.url}/batch answers .*{line}" if "tokens" in line else line):
                rollouts.make(0)


def test_a_run_api_that_gives_no_uuid(parts, toy, monkeypatch):
    api = RunApi()
    monkeypatch.setattr("grpo.extras.serve.sources.atropos.POLL", 0.01)
    monkeypatch.setattr(api, "answer", lambda path, body: (200, {"batch_size": -1}))
    with (
        trainer(parts, toy, api) as (_, rollouts),
        pytest.raises(RolloutError, match=r"Registration failed: .* gave no uuid in 5"),
    ):
        rollouts.make(0)


def test_what_environments_change_and_leave_out(parts, toy, caplog):
    """Smaller groups, no log-probabilities (ours are known), advantages, and an advantage set to zero."""
    api = RunApi()

    def change(item, number):
        item["inference_logprobs"] = None
        item["advantages"] = [[0.25 + number % 2] * len(ids) for ids in item["tokens"]]
        item["overrides"] = [{"set_advantage_to_zero": True}] + [{}] * (len(item["tokens"]) - 1)

    with trainer(parts, toy, api) as (source, rollouts), environment(source, api, size=2, change=change):
        groups = rollouts.make(0).groups
        assert [len(group) for group in groups] == [2, 2, 2, 2]
        assert [[sample.reward.advantage for sample in group] for group in groups] == [[0.0, 0.25], [0.0, 1.25]] * 2
        assert all(max(turn.completion.logprobs) <= 0 for group in groups for sample in group for turn in sample.turns)
        url = source.served.url
        with source.served.open(), pytest.raises(OSError, match="400"):
            post(f"{url}/generate", {"prompt": {"prompt_token_ids": [1]}, "best_of": 2})
        until(lambda: "a request of an environment was refused: /generate" in caplog.text and "best_of" in caplog.text)
        ids = {}
        with source.served.open():
            for temperature in (0.5, 0):
                asked = {"prompt": {"prompt_token_ids": [1, 5]}, "max_tokens": 4, "temperature": temperature}
                ids[temperature] = tuple(post(f"{url}/generate", asked)["token_ids"][0])
        assert ids[0.5] != ids[0]
        assert source.served.find((1, 5), ids[0.5], None).temperature == 0.5
        with pytest.raises(RolloutError, match=r"sampled at temperature 0\.5, and the environment says 0\.7: mend its"):
            source.served.find((1, 5), ids[0.5], None, 0.7)
        with pytest.raises(RolloutError, match="temperature 0: a sample to learn from has a temperature above 0"):
            source.served.find((1, 5), ids[0], None)
        # a sample that no environment wants any more ends early, and none of the run's own samples after it does
        source.served.unwanted = {0}
        source.served.sample([(1, 2)] * 2, Sampling(6), [0, 1], lambda i, completion: None)
        assert not source.served.engine.unwanted


ITEM = {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0], "env_id": 7}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"scores": [1.0, 2.0]}, r"item 3 of the batch \(environment 7\): 1 sequences of tokens, but 2 scores"),
        ({"masks": [[-100, 3, 3]]}, "sequence 0: the mask has 3 where it must have -100 or the token's own id"),
    ],
)  # fmt: skip
def test_an_item_that_does_not_fit_is_one_line(change, line):
    with pytest.raises(RolloutError, match=line):
        list(samples_of(3, ITEM | change))


def test_a_sequence_has_the_temperature_that_its_item_says():
    of_group = {"generation_params": {"temperature": 0.7}, "group_overrides": {"temperature": 1.0}}
    for change, temperature in ((of_group, 0.7), (of_group | {"overrides": [{"temperature": 0.5}]}, 0.5), ({}, None)):
        [(_, sample)] = samples_of(3, ITEM | change)
        assert sample["temperature"] == temperature


def test_a_whole_run_with_the_stand_in(toy, tmp_path):
    api, port = RunApi(), free_port()
    env = Environment(api, f"http://127.0.0.1:{port}")
    settings = {"rollout": {"prompts": 2, "group_size": 4, "num_rollouts": 3}, "max_tokens": 6, "forecast": False}
    source = {
        "source.url": api.url,
        "source.port": port,
        "source.timeout": 300,
        "engine": "transformers",
        "debug": "smoke",
    }
    run = grpo.train(
        str(toy), source="atropos", callbacks=["samples"], output_dir=tmp_path / "run", **settings, **source
    )
    env.over = True
    assert len(run.metrics) == 3 and run.metrics["rollout/staleness"].iloc[0] == 0
    assert (
        run.metrics["rollout/logprob_gap"].iloc[0] < 1e-5
        and run.samples()["extra/versions"].str.fullmatch(r"\[\d\]").all()
    )


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "run-api").is_file(), reason="needs atroposlib")
def test_twenty_rollouts_with_the_real_run_api_learn_and_survive_a_kill(tmp_path):
    api, port, tiny = free_port(), free_port(), ROOT / "grpo" / "extras" / "demo" / "demo_models" / "wordmath"
    folder, quiet = tmp_path / "run", {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    started = partial(subprocess.Popen, cwd=ROOT, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    train = [
        sys.executable, "train.py", "source=atropos", f"source.url=http://127.0.0.1:{api}", f"source.port={port}",
        "rollout.prompts=8", "rollout.num_rollouts=20", "callbacks.checkpoint.every=5", "resume=auto", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    words = [
        REAL / "python", "examples/atropos_words.py", "serve", "--env.rollout_server_url", f"http://127.0.0.1:{api}",
        "--env.tokenizer_name", tiny, "--env.group_size", "8", "--env.max_token_length", "40", "--env.steps_per_eval", "0",
        "--openai.base_url", f"http://127.0.0.1:{port}/v1", "--openai.model_name", tiny,
    ]  # fmt: skip
    with ExitStack() as running:
        for command in ([REAL / "run-api", "--port", str(api)], words):
            running.callback(started(command).kill)
        first = started(train)
        while first.poll() is None and not (folder / "checkpoints" / "00005.ckpt").is_dir():
            time.sleep(0.2)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert subprocess.run(train, cwd=ROOT, env=quiet, capture_output=True, timeout=600).returncode == 0
    found = pd.read_csv(folder / "metrics.csv")
    assert found["step"].tolist() == [*range(1, 21)]
    fresh = found[found["rollout/staleness"] == 0]
    assert 1 in fresh["step"].tolist() and fresh["rollout/logprob_gap"].max() < 1e-5
    assert found["rollout/solve_rate"].tail(5).mean() > found["rollout/solve_rate"].head(5).mean() + 0.1
