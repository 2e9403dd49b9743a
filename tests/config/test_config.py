"""Every option of every group composes, and every node has arguments that fit the signature of its class or function."""

import functools
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from bad_inputs import GROUPS as VALUES  # benchmarks/bad_inputs.py
from bad_inputs import side_by_side
from conftest import ROOT, compose_config, with_algorithm
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from grpo.apps.cli import flat
from grpo.apps.try_algorithm import check_algorithm
from grpo.config.composing import CONF, options
from grpo.config.composing import composed as compose_line
from grpo.config.help import OURS, WIDTH, first_line, phrases_of
from grpo.config.overview import help_text
from grpo.system.errors import UserError

GROUPS = (*VALUES, "recipe", "source", "sweep", "experiment", "preflight")
OPTIONS = [(group, option) for group in GROUPS for option in options(group)]


def targets(config, path=""):
    """Yield (dotted path, node) for each node with a `_target_`."""
    if isinstance(config, dict):
        if "_target_" in config:
            yield path, config
        for name, child in config.items():
            yield from targets(child, f"{path}.{name}".lstrip("."))
    elif isinstance(config, list):
        for i, child in enumerate(config):
            yield from targets(child, f"{path}.{i}")


def check_signatures(config: DictConfig | ListConfig) -> int:
    count = 0
    for path, node in targets(OmegaConf.to_container(config, resolve=True)):
        arguments = {name: value for name, value in node.items() if name not in ("_target_", "_partial_", "_convert_")}
        signature = inspect.signature(get_object(node["_target_"]))
        bind = signature.bind_partial if node.get("_partial_") else signature.bind
        try:
            bind(**arguments)
        except TypeError as error:
            pytest.fail(f"{path}: {node['_target_']}: {error}")
        count += 1
    return count


AXES = [(group, option) for group, option in OPTIONS if group.startswith("algo/")]
USUAL = ("task", "model", "adapter", "algo", "eval", "engine", "optim", "trainer", "callbacks", "logger")
PROGRAMS = {  # the groups whose options may be chosen together, and at least so many nodes
    "train": ([*USUAL, *dict(AXES)], 10),
    "train, other groups": ([group for group in GROUPS if group not in {*USUAL, *dict(AXES)}], 10),
    "eval": (["task", "model", "engine", "trainer", "eval"], 5),
    "serve": (["model", "engine"], 2),
}


NEEDED = {"model=path": "model.path=x", "sampler=weighted": "sampler.weight=x.py:f"}
OWN = {"experiment=scalerl": "sampler="}  # it sets a key that other samplers lack


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_composes_and_binds(name, tmp_path):
    """Each option is in one of as few command lines as the largest group has options."""
    groups, least = PROGRAMS[name]
    program = name.partition(",")[0]
    lacks = () if find_spec("hydra_plugins.hydra_optuna_sweeper") else ("sweep=optuna",)
    for chosen in side_by_side(groups):
        words = [
            *(one for one in chosen if one not in lacks and not any(one.startswith(OWN.get(by, "-")) for by in chosen)),
            *(value for option, value in NEEDED.items() if option in chosen),
        ]
        folder = [] if program == "serve" else [f"output_dir={tmp_path}"]
        try:
            assert check_signatures(compose_config(*words, *folder, name=program)) >= least
        except Exception as error:
            pytest.fail(f"{' '.join(words)}: {error}")


OTHER_THAN_THE_CODE = {  # values that do not suit as a constructor's default, each with the reason
    "eval/default.by": "columns of our tasks",
    "task/tldr.target": "the length that task=tldr asks for",
    "task/tldr.solved": "a length near that target",
    "task/tldr.weights": "its rewards are counted in characters",
    "engine/vllm_shared.dtype": "the type of the shared weights",
    "task/countdown.sizes": "sizes of generated splits",
    "task/mixture.weights": "weights of the sources beside them",
    **dict.fromkeys(
        ("algo/grpo.imitation", "algo/grpo.teacher"), "keys of terms that conf/teacher adds, with its defaults"
    ),
}


def plain(value):
    """Return lists as tuples and empty values as None."""
    return (tuple(value) if isinstance(value, list) else value) or (None if value in ([], (), {}) else value)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "conf").rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_a_file_that_names_a_class_has_the_defaults_of_its_arguments(file):
    """So a default has one value. A file that only changes another file, a recipe or an experiment does not name the class."""
    for _, node in targets(yaml.safe_load(file.read_text())):
        if not node["_target_"].startswith(("grpo.", "tasks.")):
            continue
        called = get_object(node["_target_"])
        for key in node.keys() & inspect.signature(called).parameters.keys():
            default, value = inspect.signature(called).parameters[key].default, node[key]
            computed = (
                "${" in str(value) or "_target_" in str(value) or callable(plain(default)) or key in ("args", "rewards")
            )
            if default is not inspect.Parameter.empty and not computed:
                if f"{file.parent.name}/{file.stem}.{key}" in OTHER_THAN_THE_CODE:
                    assert plain(value) != plain(default)
                else:
                    assert plain(value) == plain(default), f"{file}: {key}: {value}, in the code {default}"


def test_promised_options_are_there():
    assert {"tiny", "llama1b", "llama8b", "qwen05b", "qwen15b", "qwen7b", "path"} <= {
        o for g, o in OPTIONS if g == "model"
    }
    presets = "grpo dr_grpo bnpo dapo gspo gspo_token cispo sapo rloo reinforce_pp reinforce_pp_baseline lite_ppo rolo atropos"
    presets += " dppo vespo gmpo luspo topr gpg gigpo clip_cov kl_cov ipo icepop up p3o kimi_k15 pmd_mean"
    assert {*presets.split(), "ppo_sequence"} <= {o for g, o in OPTIONS if g == "algo"}


@functools.cache
def axis_of(group: str, option: str) -> DictConfig | None:
    return with_algorithm(f"{group}={option}").algo[group.removeprefix("algo/")]


@pytest.mark.slow
@pytest.mark.parametrize(("i", "name"), enumerate(option for group, option in OPTIONS if group == "algo"))
def test_every_preset_moves_along_every_axis(i, name):
    """The chosen option replaces the preset's completely, or one line explains why they cannot be combined. Each preset meets a
    ninth of the options, and so each option some presets."""
    for chosen in side_by_side({group: 0 for group, _ in AXES})[i % 9 :: 9]:
        config = with_algorithm(f"algo={name}", *chosen).algo
        for group, option in (one.split("=") for one in chosen):
            axis = group.removeprefix("algo/")
            assert config[axis] == axis_of(group, option), f"algo={name} {group}={option}"
        try:
            check_algorithm(instantiate(config), 4, 4)
        except (UserError, InstantiationException) as error:
            reason = error.__cause__ if isinstance(error, InstantiationException) else error
            assert isinstance(reason, UserError), f"algo={name} {chosen}: {reason!r}"


def test_help_says_what_every_algorithm_and_axis_is():
    for group in (group for group in GROUPS if group.partition("/")[0] == "algo"):
        text = "".join(help_text("train", [group]).split())
        for option in options(group):
            sentence = first_line(CONF / group / f"{option}.yaml")
            assert sentence.endswith(".") and option + sentence.replace(" ", "") in text, f"{group}={option}"
    assert first_line(CONF / "algo/decoupled.yaml").endswith("corrects for the one that sampled.")


def test_every_engine_is_in_the_documentation():
    table = (ROOT / "docs" / "engines.md").read_text().partition("## Which one")[2].partition("\n## ")[0]
    for group, option in OPTIONS:
        assert group != "engine" or f"| `{option}` |" in table


def test_every_optimizer_is_in_the_documentation():
    table = (ROOT / "docs" / "hardware.md").read_text().partition("## Optimizers")[2]
    for group, option in OPTIONS:
        assert group != "optim" or f"| `{option}` |" in table


def test_variants_are_diffs_and_the_command_line_wins(tmp_path):
    config = compose_config("algo=dr_grpo", "model=tiny", f"output_dir={tmp_path}")
    assert (config.algo.advantage.scale, config.algo.reduce, config.algo.surrogate.low) == ("none", "constant", 0.2)
    assert (config.max_tokens, config.rollout.sampling.max_tokens, config.eval.sampling.max_tokens) == (40, 40, 40)
    config = compose_config("max_tokens=7", "optim.optimizer.lr=0.5", f"output_dir={tmp_path}")
    assert (config.algo.max_tokens, config.rollout.sampling.max_tokens, config.optim.optimizer.lr) == (7, 7, 0.5)


def command(*arguments: str) -> subprocess.CompletedProcess:
    """Run a command that ends before a run begins, and check that it imports none of the large libraries."""
    words = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "hydra" in imported and not imported & {"torch", "lightning", "transformers", "datasets", "peft"}, arguments
    done.stderr = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done


def test_help_and_cfg_are_for_people(tmp_path):
    short, text = (command("train.py", "--help", *more).stdout for more in ((), ("all",)))
    named = re.sub(r"\s+", " ", short)
    assert len(short.splitlines()) <= 120 and "* wordmath" in named and "--help all: " in named
    assert all(f"\n{group:<20}" in short for group in GROUPS) and "Other keys: module, seed, data_seed," in named
    assert all(re.search(rf"[ ,]{re.escape(option)}[ ,]", named) for _, option in OPTIONS)
    for group in GROUPS:
        assert f"\n{group:<20}" in text
    for _, option in OPTIONS:
        assert f" {option} " in text and option != "base"
    assert "\n  * wordmath " in text and max(map(len, text.splitlines())) <= WIDTH
    assert "python train.py -m algo=grpo,dr_grpo seed=0,1" in text
    assert "# prompts per rollout (integer >= 1)\n" in text and "(number > 0 and <= 1)\n" in text
    printed = command("train.py", "--cfg", "job", "--resolve", f"hydra.run.dir={tmp_path}")
    assert OmegaConf.create(printed.stdout).algo.max_tokens == 40, printed.stderr
    assert "python eval.py run=" in command("eval.py", "--help").stdout


def test_every_group_and_key_has_a_phrase():
    config = compose_line("train", [], return_hydra_config=True)
    groups, phrases = phrases_of("train", config.hydra.runtime.choices)
    assert set(groups) == set(GROUPS) and all(groups.values())
    keys = [key for key in flat(OmegaConf.to_container(config)) if not set(key.split(".")) & set(OURS)]
    assert len(keys) > 90 and [key for key in keys if not phrases.get(key, groups.get(key.replace(".", "/")))] == []


def learning_rate(*overrides: str) -> float:
    return compose_config("output_dir=.", *overrides).optim.optimizer.lr


def test_a_recipe_suits_the_model_and_the_adapter_and_a_model_file_sets_the_model_only():
    assert (learning_rate(), learning_rate("adapter=lora")) == (1.5e-4, 1.5e-3)
    large = ("task=gsm8k", "model=llama1b")
    assert (learning_rate(*large), learning_rate(*large, "adapter=lora")) == (1e-6, 1e-5)
    assert learning_rate("model=llama1b", "adapter=lora") == learning_rate("adapter=lora", "model=llama1b") == 1e-5
    assert learning_rate("adapter=lora", "optim.optimizer.lr=0.5") == 0.5
    config = compose_config("experiment=gsm8k_tiny", "output_dir=.")
    assert (config.optim.optimizer.lr, config.rollout.num_rollouts) == (1.5e-4, 20)
    assert "optim" not in compose_config("output_dir=.", name="eval")


@pytest.mark.slow
def test_a_mistake_and_a_sweep_s_parent_start_quickly(tmp_path):
    mistake = command("train.py", "-m", "seed=0,1", "trainer.devices=2", f"hydra.sweep.dir={tmp_path}/sweep")
    assert "error: trainer.devices=2: a job of a sweep uses one device" in mistake.stderr
    mistake = command("train.py", "-m", "seed=0,-1", f"hydra.sweep.dir={tmp_path}/values")
    assert mistake.stderr == "error: seed=-1 must be an integer of at least 0 and at most 4294967295"
    assert "did you mean rollout.group_size?" in command("train.py", "rollout.group_sze=4").stderr
    assert "is neither a run" in command("eval.py", "compare=A,B", f"hydra.run.dir={tmp_path}/compared").stderr
