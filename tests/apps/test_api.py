"""The Python API: equal to the command line, also from a program elsewhere, and with objects in place of options."""

import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import gsm8k
import lightning as L
import pytest
import search_agent
import torch
from conftest import EXAMPLES, ROOT, compose_config
from datasets import Dataset
from helpers.runs import rows, state
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from grpo.apps.api import save_rows, split
from grpo.apps.cli import check_run
from grpo.config.composing import literal
from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action
from grpo.system.errors import UserError
from train import train

COUNTRIES = search_agent.COUNTRIES

PROGRAM = """
import grpo


def varied(completions, **columns):
    return [len(completion.encode()) % 7 / 7 for completion in completions]


if __name__ == "__main__":
    run = grpo.train(
        {toy!r}, task="gsm8k", rewards=varied, algo="dr_grpo", output_dir="run", max_tokens=8, debug="smoke", forecast=False,
        preflight="off", callbacks="checkpoint", rollout={{"num_rollouts": 3, "sampling": {{"temperature": 0.9}}}},
        **{{"task.path": {rows!r}, "algo/kl": "loss", "optim.optimizer.lr": 1e-3}},
    )
    assert run.status == grpo.load_run("run").status == "finished" and len(run.metrics) == 4
    print(run.model.num_parameters(), "parameters in", run.folder)
"""


@pytest.mark.slow
def test_a_program_elsewhere_trains_what_the_command_line_trains(smoke, toy, tmp_path):
    """The program's file has the name of ours, and its folder is not the project's."""
    (tmp_path / "elsewhere").mkdir()
    program = tmp_path / "elsewhere" / "train.py"
    program.write_text(PROGRAM.format(toy=str(toy), rows=str(EXAMPLES)))
    said = ["algo=dr_grpo", "algo/kl=loss", "rollout.num_rollouts=3", "rollout.sampling.temperature=0.9"]
    said += f"""callbacks=checkpoint task.rewards={program}:varied task.weights=null
        output_dir={tmp_path / "line"}""".split()
    train(compose_config(*smoke(*said)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], cwd=program.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "parameters in run" in done.stdout, done.stderr
    line, api = state(tmp_path / "line"), state(program.parent / "run")
    assert line["state_dict"].keys() == api["state_dict"].keys()
    assert all(torch.equal(weight, api["state_dict"][name]) for name, weight in line["state_dict"].items())
    assert rows(tmp_path / "line") == rows(program.parent / "run")
    assert rows(tmp_path / "line")[1]["loss/grad_norm"] > 0


class Ended(L.Callback):
    def on_train_end(self, trainer, module) -> None:
        self.updates = module.updates


def is_long(prompts, completions, **columns):
    return [float(len(completion) > 12) for completion in completions]


def test_objects_take_the_place_of_options(toy, tmp_path, capsys):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(toy), AutoTokenizer.from_pretrained(toy)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ended = Ended()
    settings = {
        "tokenizer": tokenizer,
        "dataset": {"train": [{"prompt": f"{i} + 1 ="} for i in range(8)], "test": [{"prompt": "1 + 9 ="}]},
        "rewards": [is_long, "format"],
        "adapter": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "callbacks": [ended, "samples", "checkpoint"],
        "max_tokens": 8,
        "rollout": {"num_rollouts": 2, "prompts": 2, "group_size": 4},
        "preflight": "off",
        "forecast": False,
    }
    run = grpo.train(model, **settings, output_dir=tmp_path / "run")
    assert run.status == "finished" and ended.updates == 2 and isinstance(run.model, PeftModel)
    assert all(torch.equal(p, before[name.replace(".base_layer", "")]) for name, p in base_weights(run.model))
    assert set(run.samples()["reward/is_long"]) <= {0.0, 1.0} and {"prompt"} <= set(run.samples().columns)
    assert len(run.evaluations([0])) == 1  # the row of the test split
    results = grpo.evaluate(run, output_dir=tmp_path / "eval").results
    assert results["accuracy"]["n"] == 1 and results["accuracy"]["value"] in (0.0, 1.0)
    saved = grpo.load_run(tmp_path / "run").config
    assert saved["task"]["rewards"] == {
        "_target_": "grpo.config.objects.given",
        "key": "task.rewards",
        "type": "builtins.list",
    }
    with pytest.raises(UserError, match=r"task\.rewards was an object of a Python program .*: give it again"):
        grpo.evaluate(tmp_path / "run", output_dir=tmp_path / "again")


def test_the_script_of_trls_readme(tmp_path):
    """As docs/python.md has it, with two rows of that dataset's form in place of the hub's, and the demo's model."""
    block = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)[1]
    questions = ("Sam has 10 coins. Sam finds 5 coins. How many coins does Sam have?", "What is 3 + 4?")
    prompts = [[{"role": "user", "content": question}] for question in questions]
    trained = []

    def load_dataset(name, split):
        assert (name, split) == ("trl-lib/DeepMath-103K", "train")
        return Dataset.from_dict({"prompt": prompts, "solution": ["$15$", "$7$"]})

    def small(model, **given):
        assert model == "Qwen/Qwen2.5-0.5B-Instruct"
        quick = {"debug": "smoke", "preflight": "off", "forecast": False, "max_tokens": 24, "eval": {"every": 0}}
        rows = {"task.held_out.test": 0, "task.splits.test": None, "callbacks": "samples"}
        trained.append(grpo.train("tiny", **given, **quick, **rows, output_dir=tmp_path / "run"))

    exec(block, {"load_dataset": load_dataset, "grpo": SimpleNamespace(train=small)})
    samples = trained[0].samples()
    assert len(samples) == 8 and samples["reward"].isin([0, 1]).all()
    assert samples["reward"].equals(samples["correct"].astype(float))


def base_weights(model):
    named = ((name.removeprefix("base_model.model."), p) for name, p in model.named_parameters())
    return [(name, p) for name, p in named if "lora_" not in name]


def test_a_mistake_is_one_line():
    with pytest.raises(UserError, match=r"there is no key 'rolout\.prompts'; did you mean rollout\.prompts"):
        grpo.train("tiny", rolout={"prompts": 4})
    with pytest.raises(UserError, match="there is no key 'reward_funcs'; TRL's reward_funcs is rewards here"):
        grpo.train("tiny", reward_funcs=varied_lengths)
    with pytest.raises(UserError, match="there is no key 'num_generations'; TRL's num_generations is"):
        grpo.train("tiny", num_generations=4)
    with pytest.raises(UserError, match=r"algo has no option 'gpro'; options: .*grpo"):
        grpo.train("tiny", algo="gpro")
    with pytest.raises(UserError, match="a task that is an object has its own score"):
        grpo.train("tiny", search_agent.Countries(), rewards="correct")
    with pytest.raises(UserError, match="on several devices each process runs this program: give output_dir"):
        grpo.train("tiny", trainer={"devices": 2})
    with pytest.raises(UserError, match="belongs to a model that is an object"):
        grpo.train("tiny", tokenizer=object())


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("model.dtype", {"model": torch.nn.Linear(1, 1), "model.dtype": "bfloat16"}),
        ("model.path", {"model": torch.nn.Linear(1, 1), "model.kernels": "none", "model.path": "elsewhere"}),
        ("model.chat_template", {"model": object(), "tokenizer": object(), "model.chat_template": "none"}),
        ("optim.optimizer.lr", {"optimizer": partial(torch.optim.SGD, lr=0.1), "optim": {"optimizer": {"lr": 1.0}}}),
        ("optim.optimizer", {"optim": object(), "optimizer": partial(torch.optim.SGD, lr=0.1)}),
        ("engine.max_cache_tokens", {"engine": object(), "engine.max_cache_tokens": 8}),
        ("algo/kl", {"algo": object(), "algo/kl": "loss"}),
        ("task.seed", {"task": object(), "task.seed": 1}),
        ("task.rewards", {"task": object(), "task.rewards": [is_long]}),
    ],
)
def test_a_key_below_an_object_is_refused(key, settings):
    with pytest.raises(UserError, match=f"^{re.escape(key)} has no effect beside .*=..., which is an object"):
        grpo.train(**settings)


def test_rows_beside_a_task_or_a_path_that_would_hide_them_are_refused():
    for settings in ({"task": search_agent.Countries()}, {"task.path": "rows.jsonl"}):
        with pytest.raises(UserError, match=r"dataset=\.\.\. belongs to a task by its name"):
            grpo.train("tiny", dataset=[{"prompt": "1 + 1 ="}], **settings)


def test_a_resumed_run_keeps_the_rows_that_it_began_with(tmp_path):
    save_rows([{"prompt": "1 + 1 ="}], tmp_path)
    (tmp_path / "config.yaml").touch()  # the run has begun
    save_rows([{"prompt": "2 + 2 ="}], tmp_path)
    assert Dataset.from_parquet(str(tmp_path / "data" / "train.parquet"))["prompt"][:] == ["1 + 1 ="]


def test_keys_that_act_beside_a_model_object_stay():
    words, _ = split({"model": torch.nn.Linear(1, 1), "model.kernels": "none", "model.chat_template": "none"})
    assert words == ["model=path", "model.kernels='none'", "model.chat_template='none'"]


def test_under_torchrun_a_program_names_its_folder_as_the_command_line_does(smoke, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    config = compose_config(*smoke())
    check_run(config, True, [f"output_dir={config.output_dir}"])
    with pytest.raises(UserError, match=r"each process would make a folder of its own: set hydra\.run\.dir"):
        check_run(config, True, [])


def test_a_run_without_evaluations_says_that_there_will_be_no_best(smoke, caplog):
    with caplog.at_level("INFO"):
        check_run(compose_config(*smoke("callbacks=[checkpoint]", "eval.every=0")), True, [])
        check_run(compose_config(*smoke("callbacks=[checkpoint]", "eval.every=1")), True, [])
        other = ("eval.every=0", "callbacks.checkpoint.monitor=rollout/reward")
        check_run(compose_config(*smoke("callbacks=[checkpoint]", *other)), True, [])
    assert caplog.text.count("eval.every=0: the run is not evaluated, and there is no checkpoints/best") == 1


@pytest.mark.parametrize(
    "value",
    [
        "", "1/2", "it's", "a\\", "\\'", 'say "no"', "a, b=[c]", "null", "1e-3", 1e-05, -2, True, None,
        ["a'b", [1, None]],
    ],
)  # fmt: skip
def test_a_value_is_the_same_behind_hydras_grammar(value):
    [word], _ = split({"key": value})
    [override] = OverridesParser.create().parse_overrides([word])
    assert override.value() == value and type(override.value()) is type(value) and literal(value) == word[4:]


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        ({"task.weights": {"correct": 1, "mine.format": 0.5}}, "task.weights", {"correct": 1, "mine.format": 0.5}),
        ({"task": {"weights": {"my f: x": 2}}}, "task.weights", {"my f: x": 2}),
        ({"task.weights": {"format": {"schedule": "linear", "from": 0.5, "to": 0}}}, "task.weights.format.to", 0),
        ({"optim.schedule": {"scheduler_specific_kwargs": {"num_cycles": 2}}}, "optim.schedule.name", "constant_with_warmup"),
        ({"optim": {"schedule.scheduler_specific_kwargs": {"a": 2}}}, "optim.schedule.scheduler_specific_kwargs.a", 2),
        ({"rollout.sampling": {"vllm": {"min_tokens": 4}}, "max_tokens": 8}, "rollout.sampling.vllm", {"min_tokens": 4}),
        ({"eval": {"samples": 4, "sampling.temperature": 1}}, "eval.sampling.temperature", 1),
        ({"sampler": "staged", "sampler.weight.stages": [{"values": ["it's"]}]}, "sampler.weight.stages", [{"values": ["it's"]}]),
        ({"algo/advantage": "gdpo", "algo.advantage": {"weights": {"correct": 1}}}, "algo.advantage.weights", {"correct": 1}),
    ],
)  # fmt: skip
def test_a_dictionary_is_the_value_of_a_key_that_is_null_too(values, key, value):
    words, objects = split(values)
    config = OmegaConf.to_container(compose_config("output_dir=.", *words), resolve=True)
    for name in key.split("."):
        config = config[name]
    assert config == value and not objects


# -- examples/


def test_gsm8k_by_hand_is_the_command_lines_run(smoke, toy, tmp_path, capsys):
    sizes = {"rollouts": 2, "prompts": 2, "max_tokens": 8, "lr": 1e-3}
    by_hand = tmp_path / "by_hand"
    gsm8k.main(str(toy), str(EXAMPLES), **sizes, folder=str(by_hand), rewards=(varied_lengths,), weights=None)
    said = ["algo=dr_grpo", "rollout.group_size=8", "eval.every=10", "eval.limit=200", "callbacks=[checkpoint]"]
    said += ["task.rewards=test_api.varied_lengths", "task.weights=null", "optim.schedule.name=constant"]
    train(
        compose_config(*smoke(*said, "rollout.prompts=2", "rollout.num_rollouts=2", f"output_dir={tmp_path / 'line'}"))
    )
    by_hand = AutoModelForCausalLM.from_pretrained(by_hand / "policy").state_dict()
    line = {name.removeprefix("policy."): weight for name, weight in state(tmp_path / "line")["state_dict"].items()}
    assert by_hand.keys() == line.keys() and all(torch.equal(weight, line[name]) for name, weight in by_hand.items())
    assert rows(tmp_path / "line")[1]["loss/grad_norm"] > 0 and "held-out accuracy" in capsys.readouterr().out


def varied_lengths(prompts, completions, **columns):
    return [len(completion.encode()) % 7 / 7 for completion in completions]


@pytest.mark.slow
def test_the_search_agent_trains(tmp_path_factory, tmp_path, capsys):
    """Its tool, its reward on a right trajectory, and two rollouts of a random model whose template has tools."""
    from grpo.extras.demo.demo_model import make_model, make_tokenizer

    task = search_agent.Countries()
    example = task.examples("test")[0]
    env = task.build(example)
    state_ = env.start()
    for query in (example["person"], example["city"]):
        state_ = env.step(Action(Message("assistant", "", (ToolCall("search", {"query": query}),))))
    assert state_.messages[-1].content == f"{example['city']} is a city in {COUNTRIES[example['city']]}."
    tokenizer = make_tokenizer(["In which country does train person 7 live?"] * 30, tools=True)
    tokenizer.save_pretrained(tmp_path / "model")
    make_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")
    sizes = {"rollout": {"num_rollouts": 2, "prompts": 2, "group_size": 2}, "eval": {"limit": 2}, "max_tokens": 8}
    search_agent.main(str(tmp_path / "model"), **sizes, preflight="off", forecast=False, output_dir=tmp_path / "run")
    assert grpo.load_run(tmp_path / "run").status == "finished" and "held out: 0.0% before" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gsm8k", "search_agent"])
def test_an_example_fits_on_a_page(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 60
