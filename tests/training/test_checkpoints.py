"""Checkpoints as plain data: exact, without code, found out if damaged, and never half written."""

import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import EXAMPLES, compose_config
from helpers.runs import VARIED
from helpers.slots import Varied
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from grpo.apps.cli import one_line_errors
from grpo.config.resuming import check_resumed, is_over
from grpo.data.prompts import Uniform
from grpo.data.rows import fingerprint
from grpo.env.messages import Message
from grpo.evaluation.evaluator import Evaluation
from grpo.evaluation.intervals import mean_interval
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Limits
from grpo.runs.run import Run
from grpo.system import files
from grpo.system.errors import UserError
from grpo.system.files import replacing, surviving
from grpo.system.seeds import random_states, set_random_states
from grpo.training.callbacks.checkpoint import Checkpoint, UnsavedError
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.checkpoints import PlainCheckpoints, RowsInFiles, RunCheckpoints, fault_of, link, new_folder, usable
from grpo.training.plain import Tensors, from_plain, to_plain
from train import train


def test_best_is_what_the_disk_took(tmp_path, toy, toy_model):
    """30 % is written. 50 % is not, so 40 % is better than what is there; the last policy of all is lost."""
    checkpoint = Checkpoint(Pretrained(str(toy)).tokenizer(), str(tmp_path / "checkpoints"), 4)
    module = SimpleNamespace(policy=toy_model)

    def after(rollouts: int, accuracy: float) -> list:
        checkpoint.rollouts = rollouts
        checkpoint.compare(module, {"eval/accuracy": accuracy})
        return [(tmp_path / "checkpoints" / "best").resolve().name, checkpoint.chosen, checkpoint.lost]

    assert after(1, 0.3) == ["policy_00001", "max eval/accuracy, 30.0 %", []]
    with full_disk(100_000):
        assert after(2, 0.5) == ["policy_00001", "max eval/accuracy, 30.0 %", [2]]
    assert after(3, 0.4) == ["policy_00003", "max eval/accuracy, 40.0 %", [2]]
    checkpoint.saved = 3
    checkpoint.teardown(None, module, "fit")  # nothing to say
    with full_disk(100_000):
        assert after(4, 0.6)[2] == [2, 4]
    checkpoint.saved = 4
    with pytest.raises(UnsavedError, match=r"the policy after 4 rollouts was not written, .*resume=auto begins anew"):
        checkpoint.teardown(None, module, "fit")


def test_a_run_that_is_resumed_has_the_best_of_its_checkpoint(tmp_path, toy, toy_model):
    """Killed after 40 % at 2, which no checkpoint knows, it goes on from 30 % at 1: 35 % is then better."""
    first, module = Checkpoint(Pretrained(str(toy)).tokenizer(), str(tmp_path), 4), SimpleNamespace(policy=toy_model)

    def after(checkpoint: Checkpoint, rollouts: int, accuracy: float) -> str:
        checkpoint.rollouts = rollouts
        checkpoint.compare(module, {"eval/accuracy": accuracy})
        return (tmp_path / "best").resolve().name

    assert after(first, 1, 0.3) == "policy_00001"
    first.export(module, "last")
    state = first.state_dict()
    assert after(first, 2, 0.4) == "policy_00002"
    resumed = Checkpoint(first.tokenizer, str(tmp_path), 4)
    resumed.load_state_dict(state)
    assert (tmp_path / "best").resolve().name == "policy_00001"
    assert after(resumed, 2, 0.2) == "policy_00001" and after(resumed, 3, 0.35) == "policy_00003"


def test_checkpoints_of_an_abandoned_course_are_removed(tmp_path, toy, toy_model):
    """A run that goes on from 1 meets the checkpoints of 2 and 3, from before: after its own 2 it keeps 1 and 2."""
    checkpoint = Checkpoint(Pretrained(str(toy)).tokenizer(), str(tmp_path), 4, keep=2)
    for rollouts in (1, 2, 3):
        (tmp_path / f"{rollouts:05}.ckpt").mkdir()
    trainer = SimpleNamespace(is_global_zero=True, save_checkpoint=lambda path: path.mkdir(exist_ok=True))
    checkpoint.rollouts = 2
    checkpoint.save(trainer, SimpleNamespace(policy=toy_model))
    assert sorted(path.name for path in tmp_path.glob("0*.ckpt")) == ["00001.ckpt", "00002.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "00002.ckpt"


class Full(L.Callback):
    """From the second rollout on, the disk takes no file as large as a policy."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch.rollout == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.slow
def test_a_run_whose_last_policy_is_lost_has_not_finished(smoke, tmp_path, capsys, monkeypatch):
    from grpo.extras.report import write_report

    monkeypatch.setattr("sys.argv", ["train.py"])
    words = ["callbacks=[samples,checkpoint,terminal]", "callbacks.checkpoint.every=1", "rollout.num_rollouts=3"]
    words.append("+callbacks.full={_target_: test_checkpoints.Full}")
    with full_disk(10**9), pytest.raises(SystemExit) as ended, one_line_errors("train"):
        train(compose_config(*smoke(*words)))
    told, manifest = capsys.readouterr(), Run(tmp_path).manifest
    assert ended.value.code == 74 and told.err.endswith("trains on from the checkpoint after 1 rollouts\n")
    assert "not written: policy_00002, 00002.ckpt, policy_00003, 00003.ckpt" in " ".join(told.out.split())
    assert manifest["status"] == "failed" and manifest["error"].startswith("UnsavedError: the policy after 3 rollouts")
    lost = ["policy_00002", "00002.ckpt", "policy_00003", "00003.ckpt"]
    assert [Path(name).name for name in manifest["not_written"]] == lost
    write_report(tmp_path)
    assert all(f"checkpoints/{name}" in (tmp_path / "report.html").read_text() for name in lost)
    config = compose_config(*smoke("rollout.num_rollouts=3", "resume=auto"))
    assert not is_over(config)  # so that the same command continues


def test_plain_data_returns_what_it_was_given(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    given = {
        "tied": [weight, weight],
        "views": (weight.T, weight[1]),
        "kinds": [
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.tensor([], dtype=torch.int64),
            np.arange(3, dtype=np.uint32),
        ],
        "numbers": {0: 1, 1: float("inf"), (2, "x"): -0.1, "$tuple": None},
        "lists": OmegaConf.create([0.9, [1]]),
        "texts": ["$tensor", "\N{SNOWMAN}\0", b"\x00\xff", {1, 2}],
        "records": [Limits(max_turns=3), Message("user", "hi"), np.float64(2.5)],
    }
    PlainCheckpoints().save_checkpoint(given, tmp_path / "00001.ckpt")
    found = PlainCheckpoints().load_checkpoint(tmp_path / "00001.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(given.pop("tied"), found.pop("tied"), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given.pop("views"), found.pop("views"), strict=True))
    for a, b in zip(given.pop("kinds"), found.pop("kinds"), strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and a.tolist() == b.tolist()
    assert found == given and type(found["records"][2]) is float
    assert (tmp_path / "00001.ckpt" / "tensors.safetensors").stat().st_size < 1000


def test_a_checkpoint_that_was_read_is_not_mapped(tmp_path):
    """AdamW's state would keep the file in memory, beside the pages that it has changed. Sharded tensors are read later."""
    PlainCheckpoints().save_checkpoint({"weight": torch.ones(1000)}, tmp_path / "00001.ckpt")
    for lazily in (False, True):
        found = PlainCheckpoints().load_checkpoint(tmp_path / "00001.ckpt", lazily=lazily)
        assert found["weight"].sum() == 1000
        assert (f"{tmp_path}/00001.ckpt" in Path("/proc/self/maps").read_text()) == lazily


def test_rows_in_several_files_are_read_in_their_order():
    parts = torch.arange(18).view(9, 2).split([2, 3, 4])
    rows = RowsInFiles(parts)
    assert rows.shape == (9, 2) and torch.equal(rows[1:7], torch.arange(2, 14).view(6, 2))


def test_a_nan_and_the_states_of_generators_stay():
    tensors = Tensors()
    before = random_states()
    plain = json.loads(json.dumps(to_plain([before, float("nan")], tensors)))
    drawn = [torch.rand(2).tolist(), np.random.rand(), os.urandom(0)]
    states, nan = from_plain(plain, tensors)
    set_random_states(states)
    assert [torch.rand(2).tolist(), np.random.rand(), os.urandom(0)] == drawn and nan != nan


def test_code_does_not_travel(tmp_path):
    """A file names records alone, with fields of their types; no other name is imported."""
    with pytest.raises(TypeError, match=r"callbacks\.mine is a Mock|callbacks\.mine is a function"):
        to_plain({"callbacks": {"mine": lambda: 1}}, Tensors())
    places = {"sampling": {"$is": "grpo.engines.protocol.Sampling", "max_tokens": 8}, "prompts": 1, "num_rollouts": 1}
    plan = {"$is": "grpo.rollout.types.Plan", "group_size": 2, **places}
    assert from_plain(plan, {}).sampling.max_tokens == 8
    attacks = [
        {"$is": name, "cache": f"{tmp_path}/made", "level": f"{tmp_path}/evil.py:f"}
        for name in (
            "os.system",
            "grpo.system.files.write_text",
            "collections.Counter",
            3,
            "grpo.extras.judges.llm_judge.Judge",
        )
    ]
    attacks.append(
        {"$is": "grpo.objectives.algorithm.Algorithm", "level": f"{tmp_path}/evil.py:f", "reduce": "sequence"}
    )
    attacks += [plan | {"prompts": "4"}, plan | {"sampling": plan}, plan | {"limits": {"max_turns": 3}}]
    attacks.append(
        plan | {"sampling": {"$is": "grpo.engines.stop_texts.StopTexts", "texts": ["x"], "decode": "os.system"}}
    )
    attacks.append({"$is": "grpo.env.tokens.Completion", "ids": [1.5], "logprobs": [0], "finish": "stop"})
    attacks.append({"$is": "grpo.env.types.Trajectory", "steps": [{"$tuple": [1, 2]}]})
    attacks.append({"$is": "grpo.env.types.Reward", "value": [1.0], "correct": True})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')\ndef f(*args): pass\n")
    loaded = {*sys.modules}
    for attack in attacks:
        with pytest.raises(ValueError, match=r"is no record of a checkpoint|has a value of another type"):
            from_plain({"callbacks": [{"objects": attack}]}, {})
    assert not (tmp_path / "made").exists() and {*sys.modules} == loaded


@pytest.fixture(scope="module")
def two(toy, tmp_path_factory):
    """The folder of a run with checkpoints after one and after two rollouts."""
    folder = tmp_path_factory.mktemp("two") / "run"
    config = compose_config(*of_two(toy), "eval.every=0", f"output_dir={folder}")
    del config.data_seed  # as in the configuration of a run of an older version
    config.task = VARIED
    train(config)
    return folder


CHOSEN = """rollout.epochs=1.5 data_seed=5 eval.every=1 callbacks.checkpoint.monitor=eval/seen/length
    callbacks.checkpoint.mode=min callbacks.checkpoint.history=1 callbacks.checkpoint.history_keep=2
    callbacks.checkpoint.only_model=true callbacks.checkpoint.keep=1""".split()


def of_two(toy) -> list[str]:
    settings = (
        f"task=gsm8k model=path model.path={toy} debug=smoke callbacks=[checkpoint,samples] forecast=false".split()
    )
    settings += "callbacks.checkpoint.every=1 rollout.num_rollouts=3 preflight=off max_tokens=8".split()
    return settings


def test_the_newest_stay_and_links_name_them(two):
    folder = two / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == "00002.ckpt 00003.ckpt last last.ckpt policy_00003".split()
    assert (folder / "last.ckpt").readlink().name == "00003.ckpt" and (
        folder / "last"
    ).readlink().name == "policy_00003"
    for given in (two, folder / "last.ckpt", folder / "00003.ckpt"):
        assert usable(given).resolve() == (folder / "00003.ckpt").resolve()


@pytest.fixture(scope="module")
def chosen(two, toy, tmp_path_factory):
    """The folder of a run of 1.5 passes over 4 rows, so of 3 rollouts, with most of what a checkpoint may have."""
    folder = tmp_path_factory.mktemp("chosen") / "run"
    config = compose_config(*of_two(toy), *CHOSEN, f"output_dir={folder}")
    config.task = VARIED
    config.eval.sets = {"seen": {"task": VARIED | {"splits": {"train": "train", "test": "train"}}}}
    train(config)
    return folder


def test_the_best_is_chosen_by_the_metric_and_its_direction(chosen):
    """checkpoints/best is the shortest on a set of its own, and the card and the table of the run say so."""
    run, folder = Run(chosen), chosen / "checkpoints"
    lengths = run.curve("eval/seen/length")
    assert lengths.tolist() == [part["tokens"].mean() for _, part in seen(run).groupby("rollout")]
    best = min(lengths.index, key=lambda at: (lengths[at], at == 0))  # the policy before training gives way
    assert (folder / "best").resolve().name == f"policy_{best:05}"
    card = (folder / "best" / "README.md").read_text()
    assert f"| best policy of the run | chosen by `eval/seen/length` (min), here {lengths[best]:.4g} |" in card
    assert "slightly optimistic" not in card
    assert run.config["rollout"]["num_rollouts"] == 3 == run.manifest["rollouts"]
    assert {name: rows["rows"] for name, rows in run.manifest["data"].items()} == {"train": 4, "test": 3, "seen": 4}


def seen(run: Run) -> pd.DataFrame:
    """Return the samples of the set."""
    samples = run.evaluations()
    return samples[samples["set"] == "seen"]


def test_readers_of_a_run_tell_its_sets_apart(chosen):
    from grpo.extras.report.run import accuracy_intervals

    run = Run(chosen)
    assert len(run.verdicts()) == 3 and run.evaluations([0])["set"].isna().sum() == 3 and len(seen(run)) == 4 * 4
    intervals = accuracy_intervals(run)
    assert set(intervals) == {"eval/accuracy", "eval/seen/accuracy"} and set(intervals["eval/accuracy"]) == {0, 1, 2, 3}
    values = seen(run).groupby("rollout")["correct"].mean()
    assert run.curve("eval/seen/accuracy").tolist() == values.tolist()


def test_the_history_stays_and_loads(chosen):
    folder = chosen / "checkpoints"
    assert {path.name: path.readlink().name for path in folder.glob("step_*")} == {
        "step_000002": "policy_00002",
        "step_000003": "policy_00003",
    }
    assert AutoModelForCausalLM.from_pretrained(folder / "step_000002").num_parameters() > 0
    assert "| rollouts learned from | 2, " in (folder / "step_000002" / "README.md").read_text()


def test_a_checkpoint_without_the_optimizer_is_smaller_and_resumes_with_a_line(chosen, two, toy, tmp_path, caplog):
    """AdamW has two moments for each weight. A resumed run has the same weights and counts; its tokens are summed over both."""
    sizes = [(run / "checkpoints" / "00003.ckpt" / "tensors.safetensors").stat().st_size for run in (chosen, two)]
    assert sizes[1] / sizes[0] == pytest.approx(3, abs=0.1)
    config = compose_config(
        *of_two(toy),
        *CHOSEN,
        *f"output_dir={tmp_path} ckpt_path={chosen} rollout.epochs=2 resume.changes=allow".split(),
    )
    config.task = VARIED
    config.eval.every = 0
    train(config)
    assert "00003.ckpt has no state of the optimizer, which begins anew" in caplog.text
    before, after = Run(chosen), Run(tmp_path)
    assert list(after.metrics.index) == [4]
    sampled = [before.curve("data/tokens"), after.curve("data/tokens")]
    new = pd.concat([before.curve("rollout/tokens"), after.curve("rollout/tokens")])
    assert [*sampled[0], *sampled[1]] == new.cumsum().tolist()
    assert after.curve("data/tokens_learned").tolist() == sampled[1].tolist()  # no group was left out
    assert (tmp_path / "checkpoints" / "best").resolve().name == (chosen / "checkpoints" / "best").resolve().name


def test_a_run_with_more_passes_is_not_over(chosen):
    for epochs, over in ((1.5, True), (2, False)):
        config = compose_config(f"rollout.epochs={epochs}", "rollout.num_rollouts=3", f"output_dir={chosen}")
        assert is_over(config) == over


def test_a_metric_that_the_run_does_not_measure_chooses_no_best(tmp_path):
    """Refused when the callback is made, or after the evaluation before training."""
    with pytest.raises(
        UserError, match=r"callbacks\.checkpoint\.monitor=evl/accuracy is no metric; similar: eval/accuracy, "
    ):
        Checkpoint(None, str(tmp_path), 3, monitor="evl/accuracy")
    evaluation = EvaluationCallback(None, None, {})
    evaluation.first = [Evaluation(0, (), {"accuracy": mean_interval([1.0], bounds=(0, 1))})]
    checkpoint = Checkpoint(None, str(tmp_path), 3, monitor="eval/acuracy")
    with pytest.raises(UserError, match="eval/acuracy is no metric of this run; similar: eval/accuracy; "):
        checkpoint.on_train_start(SimpleNamespace(callbacks=[evaluation, checkpoint]), None)


def test_the_order_of_prompts_has_a_seed_of_its_own(chosen, two):
    """The two runs have the seed 0; in one of them the prompts have the seed 5."""
    for folder, seed in ((chosen, 5), (two, 0)):
        rows = Varied(str(EXAMPLES)).examples("train")
        sampler = Uniform(rows, 2, seed)
        saved = Run(folder)
        assert saved.seed == 0 and saved.config.get("data_seed", 0) == seed
        drawn = saved.samples().groupby("rollout")["item"].unique()
        assert [list(items) for items in drawn] == [
            [fingerprint(row) for row in sampler.draw(r, sampler.size)] for r in range(3)
        ]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "sha256.json"])
@pytest.mark.parametrize("damage", [cut, flipped, lambda data: b"", lambda data: b"{}", None])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(two, file, damage, caplog):
    newest = two / "checkpoints" / "00003.ckpt"
    good = (newest / file).read_bytes()
    (newest / file).unlink() if damage is None else (newest / file).write_bytes(damage(good))
    try:
        assert usable(two).name == "00002.ckpt" == usable(two / "checkpoints" / "last.ckpt").name
        assert f"checkpoint {newest} is damaged: " in caplog.text
        with pytest.raises(UserError, match=r"is no whole checkpoint: there is also .*00002\.ckpt$"):
            usable(newest)
    finally:
        (newest / file).write_bytes(good)
    assert fault_of(newest) is None


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_is_never_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.ckpt").write_bytes(pickle.dumps(Bomb()))
    config = compose_config("output_dir=.", f"ckpt_path={tmp_path}/last.ckpt")
    with pytest.raises(UserError, match="is a file: give a run's folder"):
        check_resumed(config)
    assert not (tmp_path / "exploded").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    weights = {"good": torch.ones(2), "bad": torch.tensor([1.0, torch.inf])}
    PlainCheckpoints().save_checkpoint({"state_dict": weights}, tmp_path / "00001.ckpt")
    with pytest.raises(UserError, match="values of 1 weight are not finite, the first is bad"):
        PlainCheckpoints().load_checkpoint(tmp_path / "00001.ckpt")


def test_a_checkpoint_of_another_version_is_told(tmp_path):
    PlainCheckpoints().save_checkpoint({"weight": torch.ones(2)}, tmp_path / "00001.ckpt")
    deep = "[" * 100_000
    for state in (
        '{"$tensor": "gone"}',
        '{"$is": "grpo.gone.X"}',
        '{"$is": "os.system"}',
        '{"$items": 3}',
        "{",
        "[]",
        deep,
    ):
        (tmp_path / "00001.ckpt" / "state.json").write_text(state)
        with pytest.raises(UserError, match="was written by another version"):
            PlainCheckpoints().load_checkpoint(tmp_path / "00001.ckpt")


def test_a_checkpoint_that_lacks_a_part_is_refused(two, tmp_path):
    """Without its callbacks a run would begin at rollout 0, with later weights. Pickled tensors are not read."""
    good, folder = two / "checkpoints" / "00003.ckpt", tmp_path / "00003.ckpt"
    assert RunCheckpoints().load_checkpoint(good)["callbacks"]["RolloutCallback"]["rollouts"] == 3
    shutil.copytree(good, folder)
    whole = json.loads((good / "state.json").read_text())
    parts = ["callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict"]
    rollout = whole["callbacks"]["RolloutCallback"]
    broken = [{name: part for name, part in whole.items() if name != left} for left in parts]
    broken += [
        whole | {"callbacks": {}},
        whole | {"callbacks": {"RolloutCallback": rollout | {"rollouts": "3"}}},
        whole | {"loops": 1},
    ]
    for state in broken:
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match=r"is no whole checkpoint of a run: .* is missing in its state\.json"):
            RunCheckpoints().load_checkpoint(folder)
    (folder / "tensors.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="has no tensors that can be read"):
        RunCheckpoints().load_checkpoint(folder)


def test_nothing_to_resume_is_told(tmp_path):
    for given in (tmp_path, tmp_path / "last.ckpt", tmp_path / "gone"):
        with pytest.raises(UserError, match="is no whole checkpoint: give the folder of a run"):
            usable(given)


def test_a_folder_is_complete_or_as_before(tmp_path):
    folder = tmp_path / "00001.ckpt"
    with new_folder(folder) as new:
        (new / "file").write_text("one")
    with pytest.raises(KeyError), new_folder(folder) as new:
        (new / "file").write_text("two")
        raise KeyError
    (tmp_path / "00001.ckpt.new").mkdir()  # by a kill
    assert (folder / "file").read_text() == "one"
    with new_folder(folder) as new:
        (new / "file").write_text("three")
        assert (folder / "file").read_text() == "one"
    assert (folder / "file").read_text() == "three" and [path.name for path in tmp_path.iterdir()] == ["00001.ckpt"]
    link(tmp_path / "last", folder)
    assert (tmp_path / "last" / "file").read_text() == "three"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """A limit on the size of files, in bytes, stands for the full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_one_line_and_is_noted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(files, "LOST", {})
    whole = {"weight": torch.zeros(100_000)}
    PlainCheckpoints().save_checkpoint(whole, tmp_path / "00001.ckpt")
    with full_disk(100_000):
        PlainCheckpoints().save_checkpoint(whole, tmp_path / "00002.ckpt")
        with surviving("metrics.csv"), replacing(tmp_path / "metrics.csv") as new:
            new.write_bytes(bytes(200_000))
    assert [*files.LOST] == [str(tmp_path / "00002.ckpt"), "metrics.csv"]
    with surviving("metrics.csv"):  # written a little later
        pass
    assert [*files.LOST] == [str(tmp_path / "00002.ckpt")]
    assert [path.name for path in tmp_path.iterdir()] == ["00001.ckpt"] and fault_of(tmp_path / "00001.ckpt") is None
    assert [record.getMessage().count("was not written, and the run goes on: ") for record in caplog.records] == [1, 1]
