"""Old names go on: imports, commands, and the configurations of runs that were made before modules moved."""

import importlib
import inspect
import re
import sys

import pytest
from conftest import ROOT, compose_config
from helpers.programs import command
from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo.config.composing import composed
from grpo.config.moved import COMMANDS, Moved, new_name, new_names
from grpo.config.resuming import saved_config

pytestmark = pytest.mark.extras
CHOICES = [
    "optim=muon algo/correction=tis strategy=ddp logger=wandb callbacks=default",
    "teacher=reference algo=opd selection=dynamic sampler=signal",
    "algo=ppo critic=head engine=vllm_shared task=code",
    "source=atropos engine=vllm_server task=reasoning_gym judge=explicit judge.model=mine model=smollm2_135m",
]


@pytest.fixture
def forgotten():
    """Forget the old names afterwards."""
    yield
    for old in new_names():
        sys.modules.pop(old, None)


@pytest.mark.slow  # imports all that has moved
def test_an_old_name_gives_the_module_that_has_the_new_one(forgotten):
    for old, new in new_names().items():
        assert not (ROOT / f"{old.replace('.', '/')}.py").exists(), f"{old} has not moved"
        assert new not in new_names(), f"{new} has moved again"
        if new.startswith("tasks."):  # imports another library
            assert (ROOT / f"{new.replace('.', '/')}.py").is_file()
        elif not old.endswith("__main__"):
            try:
                now = thing(new)
            except ModuleNotFoundError as error:  # an optional package
                assert error.name.partition(".")[0] not in ("grpo", "tasks"), new
            else:
                assert not inspect.ismodule(now) or importlib.import_module(old) is now


def test_a_module_that_is_imported_by_an_old_name_keeps_its_own(forgotten):
    module = importlib.import_module("grpo.rollout.ahead.order")
    assert module.__name__ == module.__spec__.name == "grpo.extras.ahead.order"
    code = Moved().get_code("grpo.rollout.ahead.order")
    assert code.co_filename == module.__file__


def test_a_command_line_with_an_old_name_is_composed_with_the_new_one():
    target = "grpo.training.callbacks.early_stopping.EarlyStopping"
    config = composed("train", ["output_dir=.", f"+callbacks.mine._target_={target}"])
    assert config.callbacks.mine._target_ == "grpo.extras.early_stopping.early_stopping.EarlyStopping"


def thing(name: str) -> object:
    """Return a module, or what is in one."""
    module, _, what = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return getattr(importlib.import_module(module), what)


def test_what_is_in_a_module_has_moved_with_it():
    for old, new in new_names().items():
        assert new_name(f"{old}.thing") == f"{new}.thing"
    assert new_name("grpo.serve_more.thing") == "grpo.serve_more.thing"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_keeps_its_name(name):
    done = command("-m", name, "--help")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 3, done.stderr


@pytest.mark.parametrize("words", CHOICES)
def test_the_configuration_of_a_run_of_before_means_what_it_meant(words, tmp_path):
    """Its text has the old names; read again it has the new ones. Objects are made of either text, of the same classes."""
    config = compose_config("output_dir=.", *words.split())
    text = OmegaConf.to_yaml(config)
    before = old_text(text)
    newer = re.findall(r"grpo\.extras\.(\w+)\.", before)
    assert before.count("\n") == text.count("\n") and {*newer} <= {
        "float32_head",
        "images",
    }  # appendices without an old name
    (tmp_path / "config.yaml").write_text(before)
    assert OmegaConf.to_yaml(saved_config(tmp_path)) == text
    old = OmegaConf.create(before)
    for part in ("algo", "optim", "strategy"):
        then, now = instantiate(old[part]), instantiate(config[part])
        assert type(then) is type(now) and vars(then).keys() == vars(now).keys()


def old_text(text: str) -> str:
    """Return the text with the name that each module had before."""
    for old, new in sorted(new_names().items(), key=lambda pair: -len(pair[1])):
        text = re.sub(rf"\b{re.escape(new)}(?=[.\s]|$)", old, text)
    return text
