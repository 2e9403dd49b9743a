"""train.py and eval.py as a user runs them: the files of a run, resumes, messages for mistakes."""

import json
import math
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import EXAMPLES, ROOT, compose_config
from helpers.runs import VARIED, learned, rows, state, told
from hydra.errors import HydraException
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval as eval_script
from grpo.config.explain import explain
from grpo.config.resuming import saved_config
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.chat_template import TemplateRenderer
from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.evaluation.intervals import mean_interval
from grpo.extras.devices.strategy import Strategy
from grpo.models.pretrained import Pretrained
from grpo.runs.run import Run
from grpo.system.errors import StopError, UserError
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.trainer import make_trainer
from tasks.gsm8k import GSM8K
from train import train

CRASH = "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 3}"
ASKED = f"+callbacks.asked={{_target_: helpers.slots.Asked, update: 10, number: {int(signal.SIGTERM)}}}"


@pytest.mark.parametrize(
    ("policy", "ending", "done"),
    [
        pytest.param("adapter=none", CRASH, 2, marks=pytest.mark.slow),
        pytest.param("adapter=lora algo=ppo", ASKED, 3, marks=pytest.mark.slow),
        pytest.param("adapter=lora model.quantization=4bit", ASKED, 3, marks=pytest.mark.slow),
        pytest.param("model.dtype=bfloat16 algo=ppo critic=model critic.pretrain=1", CRASH, 2, marks=pytest.mark.slow),
    ],
)
def test_a_crashed_run_resumes_bit_exactly(smoke, tmp_path, policy, ending, done):
    """5 rollouts in one run equal 3, a crash and the rest: every weight, moment, metric and sample is the same. A crash loses
    what came after the last checkpoint, a SIGTERM in the third update loses nothing. done: rollouts in the checkpoint."""

    def run(folder: str, *more: str) -> None:
        settings = [
            *"""callbacks=[samples,checkpoint] callbacks.checkpoint.every=2 rollout.num_rollouts=5
            algo.num_epochs=2 algo.num_minibatches=2 algo.kl.coef=0.05 algo.kl.sync_every=3""".split(),
            "algo.entropy={coef: 0.01, target: 9.0}",
            *"selection=dynamic selection.rounds=2 optim.schedule.name=linear".split(),
            *policy.split(),
            f"output_dir={tmp_path / folder}",
        ]
        (tmp_path / folder).mkdir(exist_ok=True)
        learned(smoke(*settings, *more))

    run("straight")
    with pytest.raises((RuntimeError, StopError), match=r"the disk is full|stopped by SIGTERM"):
        run("crashed", ending)
    assert len(rows(tmp_path / "crashed")) == 4  # no measurement is lost
    run("resumed", f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")

    straight, resumed = state(tmp_path / "straight"), state(tmp_path / "resumed")
    assert straight["state_dict"].keys() == resumed["state_dict"].keys()
    for name, tensor in straight["state_dict"].items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name
    for a, b in zip(
        straight["optimizer_states"][0]["state"].values(), resumed["optimizer_states"][0]["state"].values(), strict=True
    ):
        assert all(torch.equal(a[name], b[name]) for name in a)
    masters = [saved["optimizer_states"][0].get("masters", []) for saved in (straight, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))
    assert bool(masters[0]) == ("bfloat16" in policy)
    assert straight["lr_schedulers"] == resumed["lr_schedulers"]
    owed = ending == ASKED  # the evaluation after the update, which the resumed run makes
    assert rows(tmp_path / "straight")[done + 1 - owed :] == rows(tmp_path / "resumed")
    samples = [Run(tmp_path / name).samples([5]) for name in ("straight", "resumed")]
    assert samples[0].equals(samples[1])
    assert {row["loss/grad_norm"] for row in rows(tmp_path / "straight")[1:]} != {0.0}  # there was something to learn
    critic = {key for key in straight["state_dict"] if key.startswith("critic.")}
    assert ("critic.head.weight" in critic) == ("algo=ppo" in policy)
    if "adapter=lora" in policy:
        assert all("lora_" in key for key in straight["state_dict"].keys() - critic)


def test_what_a_run_leaves(smoke, tmp_path, capsys):
    accuracy, _ = train(
        compose_config(
            *smoke(
                "callbacks=default", "callbacks.samples.token_logprobs=true", "rollout.num_rollouts=3", "eval.every=2"
            )
        )
    )
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "config.yaml", "metrics.csv", "rollouts/000001.parquet", "rollouts/000003.parquet",
        "evaluations/000000.parquet", "evaluations/000002.parquet", "evaluations/000003.parquet",
        "checkpoints/00003.ckpt/tensors.safetensors", "checkpoints/policy_00003/model.safetensors",
        "checkpoints/policy_00003/tokenizer.json",
    } <= left  # fmt: skip
    assert (tmp_path / "checkpoints/best/model.safetensors").exists() and (tmp_path / "checkpoints/last.ckpt").is_dir()
    assert any(name.startswith("tensorboard/events") for name in left)

    table = rows(tmp_path)
    assert [row["step"] for row in table] == [0, 1, 2, 3]
    assert ["eval/accuracy" in row for row in table] == [True, False, True, True]
    assert table[-1]["eval/accuracy"] == accuracy == 0.0
    names = (
        "reward reward_std solve_rate effective_groups length truncated logprob_gap logprob_gap_max format format_std "
    )
    names += "rounds discarded_groups advantages_positive advantages_negative"
    assert {f"rollout/{name}" for name in names.split()} <= table[1].keys()
    assert {
        f"loss/{name}" for name in ["policy", "approx_kl", "clip_fraction_high", "entropy", "grad_norm", "ratio_max"]
    } <= table[1].keys()
    assert table[1]["rollout/logprob_gap"] < 1e-5 and table[1]["lr"] == 1e-3
    assert table[1]["rollout/old_logprobs"] == pytest.approx(table[1]["rollout/rollout_logprobs"], abs=1e-5)
    drawn = Run(tmp_path).samples([1])["rollout_logprobs"].map(np.mean)  # no group has a signal: one row is measured
    assert any(table[1]["rollout/rollout_logprobs"] == pytest.approx(mean, abs=1e-5) for mean in drawn)

    expected = {"layout": "shared_prompt", "attention": "sdpa", "head": "torch", "layers": "transformers"}
    assert torch.cuda.is_available() or Run(tmp_path).manifest["kernels"] == expected
    sample = Run(tmp_path).samples([1]).iloc[3]
    assert (sample["rollout"], sample["prompt_index"], sample["sample"]) == (1, 1, 1)
    assert json.loads(sample["messages"])[0]["role"] == "user" and sample["advantage"] == 0.0 and sample["tokens"] <= 8

    ours = state(tmp_path)["state_dict"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "last").state_dict()
    assert all(torch.equal(ours[f"policy.{name}"], tensor) for name, tensor in theirs.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoints" / "last").chat_template

    said = capsys.readouterr().out
    assert "rollout 3/3" in said and "the run: 3 rollouts in 0:" in said and f"written to {tmp_path}" in said
    assert said.count("\nrollout 1: reward") == said.count("\nrollout 3: reward") == 1


def test_best_is_the_best_and_survives_worse(smoke, tmp_path, caplog):
    pretrained = Pretrained(next(o for o in smoke() if o.startswith("model.path=")).partition("=")[2])
    module = L.LightningModule()
    module.policy = pretrained.model()
    checkpoint = Checkpoint(pretrained.tokenizer(), str(tmp_path), num_rollouts=10, every=0)
    weight = module.policy.model.norm.weight
    for rollout, accuracy in enumerate([0.1, 0.3, 0.2, 0.3]):
        weight.data.fill_(rollout)
        checkpoint.on_train_batch_end(None, module, {}, RolloutBatch(rollout, metrics={"eval/accuracy": accuracy}), 0)
    assert load_file(tmp_path / "best" / "model.safetensors")["model.norm.weight"].unique().item() == 1
    weight.data[0] = torch.nan  # a policy that is not finite replaces nothing
    checkpoint.save(None, module)
    assert "model.norm.weight is not finite, so no checkpoint is written" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.name != "best"] == ["policy_00002"]
    # a run that is resumed elsewhere keeps its best checkpoint
    resumed = Checkpoint(pretrained.tokenizer(), str(tmp_path / "resumed"), num_rollouts=10)
    resumed.load_state_dict(checkpoint.state_dict())
    weight.data.fill_(9)
    resumed.on_train_batch_end(None, module, {}, RolloutBatch(4, metrics={"eval/accuracy": 0.25}), 0)
    assert load_file(tmp_path / "resumed" / "best" / "model.safetensors")["model.norm.weight"].unique().item() == 1


@pytest.mark.parametrize(("later", "best"), [([0.5, math.nan, 0.0], 0), ([1.0, 1.0, 0.5], 1)])
def test_the_policy_before_training_may_be_the_best(smoke, tmp_path, caplog, later, best):
    """It gives way to an equal one. An accuracy of NaN has a warning."""
    pretrained = Pretrained(next(o for o in smoke() if o.startswith("model.path=")).partition("=")[2])
    module, evaluation = L.LightningModule(), EvaluationCallback(SimpleNamespace(), None, ())
    module.policy = pretrained.model()
    evaluation.first = [Evaluation(0, (), {"accuracy": mean_interval([1.0, 1.0], bounds=(0, 1))})]
    checkpoint = Checkpoint(pretrained.tokenizer(), str(tmp_path), num_rollouts=3, every=0)
    trainer = SimpleNamespace(
        callbacks=[evaluation, checkpoint], is_global_zero=True, save_checkpoint=lambda path: None
    )
    checkpoint.on_train_start(trainer, module)
    for rollout, accuracy in enumerate(later):
        checkpoint.on_train_batch_end(
            trainer, module, {}, RolloutBatch(rollout, metrics={"eval/accuracy": accuracy}), 0
        )
    checkpoint.on_train_end(trainer, module)
    assert (tmp_path / "best").resolve().name == f"policy_{best:05}"
    assert ("rollout 2: eval/accuracy is unknown" in caplog.text) == (best == 0)
    assert ("nothing was better than before training (max eval/accuracy, 100.0 %)" in caplog.text) == (best == 0)


def greedy(model) -> list[str]:
    """Return a model's answers to our test rows."""
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    renderer = TemplateRenderer(Pretrained(model.config._name_or_path).tokenizer())
    evaluation = Evaluator(Sampling(16, temperature=0.0))(GSM8K(str(EXAMPLES)), engine, renderer, seed=0)
    return [group[0].trajectory.answer for group in evaluation.groups]


def completions(file) -> list[str]:
    return pd.read_parquet(file)["completion"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_eval_reads_a_run_a_checkpoint_a_folder_and_a_base_model(smoke, toy, tmp_path, adapter):
    run = tmp_path / "run"
    settings = ("callbacks=[checkpoint]", f"adapter={adapter}", "optim.optimizer.lr=0.03", "max_tokens=16")
    config = compose_config(*smoke(*settings, f"output_dir={run}"))
    config.task = VARIED
    train(config)
    base, last = greedy(Pretrained(str(toy)).model()), greedy(Pretrained(str(run / "checkpoints" / "last")).model())
    assert base != last

    def evaluated(*overrides: str) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        config = compose_config(*overrides, f"output_dir={folder}", name="eval")
        eval_script.evaluate(config, overrides)
        return completions(folder / "samples.parquet")

    # the run's own task and limit of tokens, unless the command line names others
    assert evaluated(f"run={run / 'checkpoints' / 'last.ckpt'}") == last
    assert evaluated(f"run={run / 'checkpoints' / 'last'}") == last
    (run / "checkpoints" / "best").rename(run / "checkpoints" / "gone")
    assert evaluated(f"run={run}") == last
    assert evaluated(f"run={run}", "max_tokens=2") != last
    ours = ("task=gsm8k", f"task.path={EXAMPLES}", "max_tokens=16")
    assert evaluated(f"run={run}", *ours) == last
    assert evaluated("model=path", f"model.path={toy}", *ours) == base
    four = evaluated("model=path", f"model.path={toy}", *ours, "eval.samples=4", "eval.sampling.temperature=1")
    assert len(four) == 12 and len(set(four)) > 3
    with pytest.raises(UserError, match="has no policy"):
        eval_script.policy_folder(str(tmp_path / "nothing"))


@pytest.mark.slow
def test_training_goes_on_from_an_adapter(smoke, tmp_path):
    """The folder of a trained adapter is a model like any other: merged into its base, then trained as a whole."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, more in ((first, ["adapter=lora"]), (second, [f"model.path={first / 'checkpoints' / 'last'}"])):
        settings = ("callbacks=[checkpoint,samples]", "optim.optimizer.lr=0.03", f"output_dir={folder}")
        learned(smoke(*settings, *more))
    assert completions(second / "evaluations" / "000000.parquet") == completions(
        first / "evaluations" / "000002.parquet"
    )
    assert rows(second)[1]["loss/grad_norm"] > 0
    assert (second / "checkpoints" / "last" / "model.safetensors").exists()
    assert "is an adapter" in told(*smoke(f"model.path={first / 'checkpoints' / 'last'}", "adapter=lora"))


@pytest.mark.parametrize(("typed", "parts"), yaml.safe_load((EXAMPLES / "mistakes.yaml").read_text()).items())
def test_mistakes_are_told_in_one_line(smoke, typed, parts):
    line = told(*smoke(*typed.split()))
    for part in parts:
        assert part in line, line


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_that_is_not_there(smoke):
    assert "trainer.accelerator=cuda is not available here: choose cpu, auto" in told(*smoke("trainer=gpu"))


def test_a_rank_that_is_left_in_the_environment(smoke, monkeypatch):
    """The process would train, and save nothing."""
    monkeypatch.setattr(rank_zero_only, "rank", 7)
    assert "this is process 7, counted from 0, of 1: unset RANK" in told(*smoke())


def test_vllm_that_is_not_there(smoke):
    if find_spec("vllm"):
        pytest.skip("vLLM is here")
    assert "pip install" in told(*smoke("engine=vllm"))


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """The folder of a run of two rollouts, which it made."""
    folder = tmp_path_factory.mktemp("trained") / "new" / "run"
    settings = f"""task=gsm8k task.path={EXAMPLES} model=path model.path={toy} debug=smoke callbacks=[checkpoint] forecast=false
        preflight=off max_tokens=8 optim.optimizer.lr=1e-3 output_dir={folder}"""
    train(compose_config(*settings.split()))
    return folder


def test_a_resumed_run_says_what_is_different(trained, smoke, caplog):
    resumed = [f"ckpt_path={trained}", "callbacks=[checkpoint]", "rollout.num_rollouts=3", "optim.max_grad_norm=2"]
    assert told(*smoke(*resumed, "algo.surrogate.high=0.28")) == (
        "the run to resume had other settings: algo.surrogate.high=0.28 (was 0.2); leave them out, or set resume.changes=allow"
    )
    train(compose_config(*smoke(*resumed, "algo.surrogate.high=0.28", "resume.changes=allow")))
    said = caplog.text.partition("resuming with other values: ")[2].partition("\n")[0].split(", ")
    changed = [
        "algo.surrogate.high=0.28 (was 0.2)",
        "optim.max_grad_norm=2 (was 1.0)",
        "rollout.num_rollouts=3 (was 2)",
    ]
    assert sorted(said) == changed  # without callbacks.checkpoint.num_rollouts, which repeats a key


def test_a_folder_with_a_run_is_not_written_over(trained, smoke):
    assert "already has a run: set hydra.run.dir" in told(*smoke(f"output_dir={trained}"))
    assert len(rows(trained)) == 3


def test_a_checkpoint_of_another_model(trained, smoke, tmp_path):
    checkpoint = f"ckpt_path={trained / 'checkpoints' / 'last.ckpt'}"
    for i, (more, message) in enumerate([
        ("algo=ppo resume.changes=allow", "a checkpoint of another model: 2 of 32 tensors differ, the first is critic.head.bias "
                                          "(missing there, (1,) here); give the model=, "),
        ("adapter=none", "learned from 2 rollouts already"),
        ("optim=sgd", "has the state of another optimizer: optim.optimizer._target_=torch.optim.SGD (was torch.optim.AdamW)"),
    ]):  # fmt: skip
        (tmp_path / str(i)).mkdir()
        assert message in told(*smoke(checkpoint, *more.split(), f"output_dir={tmp_path / str(i)}"))


@pytest.mark.parametrize("text", ["{[", "just a text\n", "[1]"])
def test_a_damaged_configuration_of_a_run_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is no configuration of a run"):
        saved_config(tmp_path)


def test_a_group_of_another_program_is_told():
    assert "there is no key 'algo'" in told("algo=dapo", "optim=sgd", name="eval")


@pytest.mark.slow
def test_the_command_line_prints_that_one_line(smoke, tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in [
        ([f"hydra.run.dir={tmp_path}/file/run"], "error: the output folder cannot be written"),
        (["rollout.group_size=1", f"hydra.run.dir={tmp_path}/run"], "error: rollout.group_size=1: advantages compare"),
        (
            ["sweep=optuna", "eval.every=0", f"hydra.sweep.dir={tmp_path}/sweep"],
            "error: eval.every=0: a search maximises",
        ),
    ]:
        done = subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
        first = f"training: task=wordmath model=tiny algo=grpo, written to {tmp_path}/run\n"
        assert done.stdout == (first if "rollout.group_size=1" in arguments else "")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]  # the folder of a run that never began is removed


def test_a_bug_keeps_its_traceback():
    assert explain(KeyError("ours"), "train") is None


def test_an_argument_that_hydra_cannot_read_is_shown_in_quotes():
    unread = {
        "max_tokens=50 %(n)s": "quote the value, and the argument for the shell: \"max_tokens='50 %(n)s'\"",
        "task.path=it's": r"""quote the value, and the argument for the shell: 'task.path='"'"'it\'"'"'s'"'"''""",
        "model.path=é\n(2)": "quote the value, and the argument for the shell: \"model.path='é (2)'\"",
        "eval={a: # }": "quote the value, or each text in it, ",
        "ta#sk=gsm8k": "an argument is KEY=VALUE",
    }
    for typed, advice in unread.items():
        with pytest.raises(HydraException) as refused:
            compose_config(typed)
        assert explain(refused.value, "train", [typed]).startswith(f"{' '.join(typed.split())}: {advice}")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"devices": 1000}, "trainer.devices=1000 are too many processes"),
        ({"num_nodes": 2}, "trainer.num_nodes=2 needs a"),
    ],
)
def test_processes_that_never_come_are_refused(given, line, monkeypatch):
    for name in ("MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    trainer = make_trainer([], [], "cpu", strategy=Strategy(), **given)
    trainer.strategy._configure_launcher()
    with pytest.raises(UserError, match=line):
        trainer.strategy.launcher.launch(print)


def test_numbers_of_products_and_of_repeated_runs():
    for deterministic in (True, "warn", False):
        make_trainer([], [], "cpu", deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == bool(deterministic)
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(UserError, match="matmul_precision=high is TF32, which only a GPU has"):
        make_trainer([], [], "cpu", matmul_precision="high")


def test_a_lack_of_memory_is_one_line():
    for give in (lambda: torch.empty(10**15), lambda: np.empty(10**15)):
        with pytest.raises((RuntimeError, MemoryError)) as lack:
            give()
        assert re.match("not enough memory: .*llocate.*docs/hardware.md", explain(lack.value, "train"))


def test_means_of_a_run_are_numbers(smoke, tmp_path):
    learned(smoke("algo=dr_grpo", "algo.num_epochs=2", "algo.kl.coef=0.1"))
    assert rows(tmp_path)[1]["loss/grad_norm"] > 0
    assert all(math.isfinite(value) for row in rows(tmp_path) for value in row.values())


@pytest.mark.parametrize("varied", [True, False])
def test_dynamic_sampling_replaces_groups_without_signal(smoke, tmp_path, varied):
    learned(
        smoke(
            *"selection=dynamic selection.rounds=8 selection.by=reward rollout.prompts=6 rollout.num_rollouts=1".split(),
            "callbacks=[samples]",
        ),
        {"_target_": "helpers.slots.Halves", "varied": varied},
    )
    written = Run(tmp_path).samples([1]).to_dict("records")
    groups = [written[i : i + 2] for i in range(0, 12, 2)]
    assert len(written) == 12 and len({group[0]["prompt"] for group in groups}) == 6  # no prompt twice
    differing = [group for group in groups if group[0]["reward"] != group[1]["reward"]]
    first = rows(tmp_path)[1]
    if varied:
        assert len(differing) == 6 and 2 <= first["rollout/rounds"] <= 8 and first["loss/grad_norm"] > 0
        total = 6 + first["rollout/discarded_groups"]  # more than half had no signal: the share is of all groups
        assert total > 8 and 6 / total <= first["rollout/effective_groups"] < 0.7
    else:  # all 40 questions were tried
        assert not differing and first["rollout/rounds"] == 7 and first["rollout/discarded_groups"] == 34
        assert first["loss/grad_norm"] == 0.0 and first["rollout/effective_groups"] == 0.0
