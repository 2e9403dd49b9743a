"""Fixtures: a toy model that is made in a second, the real configuration, and real data where it is at hand."""

import functools
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # what is not here should fail at once

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.apps.cli import quiet
from grpo.apps.demo_model import make_model, make_tokenizer
from grpo.engines.builtin.engine import TransformersEngine
from grpo.env.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.objectives.algorithm import Algorithm
from grpo.system.seeds import derive_seed

ROOT = Path(__file__).parents[1]
# where a process of its own finds the tests' modules
TEST_PATH = os.pathsep.join(map(str, [ROOT, ROOT / "tests", *(ROOT / "tests").glob("[a-z]*/")]))
EXAMPLES = ROOT / "tests" / "data"  # a few rows of our own
REAL_DATA = Path(os.environ.get("GRPO_TEST_DATA", ROOT.parent / "shared" / "data"))  # gsm8k_test.jsonl and more

quiet()
torch.set_num_threads(1)  # the models are so small that a second thread only waits


def seed(*path: int) -> int:
    """The seeds of a run, as `play` asks for them."""
    return derive_seed(7, *path)


def compose_config(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, overrides=list(overrides))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random Llama that reads and writes any text."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = make_tokenizer(["How many coins are left? 12 + 7 = 19"] * 30)
    tokenizer.save_pretrained(folder)
    make_model(tokenizer, seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def toy_model(toy: Path):
    return Pretrained(str(toy)).model()


@pytest.fixture
def parts(toy, toy_model):
    """The engine and the renderer that `play` takes."""
    engine = TransformersEngine()
    engine.load_weights(toy_model, 0)
    return engine, TokenizerRenderer(Pretrained(str(toy)).tokenizer())


@pytest.fixture
def smoke(toy: Path, tmp_path: Path):
    """Overrides of a run that takes seconds, on our own examples, written to tmp_path."""

    def overrides(*more: str) -> list[str]:
        return [
            "task=gsm8k",
            f"task.path={EXAMPLES}",
            "model=path",
            f"model.path={toy}",
            "debug=smoke",
            "callbacks=none",
            "forecast=false",
            "max_tokens=8",
            "optim.optimizer.lr=1e-3",
            f"output_dir={tmp_path}",
            *more,
        ]

    return overrides


@functools.cache
def preset(*overrides: str) -> Algorithm:
    """The algorithm of a command line, after the checks that train.py makes."""
    config = compose_config("output_dir=.", *overrides)
    try:
        algorithm = instantiate(config.algo)
    except InstantiationException as error:
        raise error.__cause__ from error
    algorithm.check(config.rollout.prompts, config.rollout.group_size)
    return algorithm
