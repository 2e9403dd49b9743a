"""Fixtures: a toy model that is made in a second, the real configuration, and real data if it is present."""

import functools
import importlib
import os
import pickle
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # a missing file fails at once
os.environ["OMP_NUM_THREADS"] = "1"  # the models are so small that a second thread only waits
if find_spec("vllm") and not find_spec("torchvision"):  # vLLM imports it for multimodal models, its CPU build lacks it
    sys.path.insert(0, str(Path(__file__).parent / "helpers" / "no_images"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))

import pytest

pytest.register_assert_rewrite("helpers")
from helpers import composing
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.apps.cli import quiet
from grpo.config import hydra_speed
from grpo.config.explain import explain
from grpo.system.errors import UserError

if TYPE_CHECKING:
    from grpo.objectives.algorithm import Algorithm

ROOT = Path(__file__).parents[1]
# import path of the tests' modules, for subprocesses
FOLDERS = [ROOT / "tests", *(ROOT / "tests").glob("[a-z]*/"), *(ROOT / "tests" / "extras").glob("[a-z]*/")]
TEST_PATH = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
EXAMPLES = ROOT / "tests" / "data"  # a few rows of our own
LISTS = {name: ROOT / "tests" / f"{name}.txt" for name in ("slow", "nightly")}  # of tests that have this mark
collected: dict[str, bool] = {}  # all tests, also those that are not chosen: whether each is nightly
REAL_DATA = Path(os.environ.get("GRPO_TEST_DATA", ROOT.parent / "shared" / "data"))  # gsm8k_test.jsonl and more

pytest_plugins = [
    "helpers.forks",
    "helpers.costs",
    "helpers.again",
    "helpers.appendices",
    "helpers.servers",
    "helpers.shapes",
]
quiet()
hydra_speed.hasten(composing.REPLACED)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that the lists name."""
    for mark, file in LISTS.items():
        names = tuple(line for line in file.read_text().splitlines() if line and not line.startswith("#"))
        for item in items:
            if item.nodeid.startswith(names):
                item.add_marker(mark)
    collected.update((item.nodeid, item.get_closest_marker("nightly") is not None) for item in items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if (
        session.config.option.forks and len(session.items) > 1000
    ):  # all forks share what is imported, and one server of commands
        from helpers import programs

        for name in programs.IMPORTED.split():
            importlib.import_module(name)
        programs.server()


def seed(*path: int) -> int:
    """Return a seed of a run, as `play` expects it."""
    from grpo.system.seeds import derive_seed  # like torch below, not for the process that only hands out tests

    return derive_seed(7, *path)


@functools.cache
def chosen(name: str, groups: tuple[str, ...]) -> bytes:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return pickle.dumps(compose(name, overrides=list(groups)))


def compose_config(*overrides: str, name: str = "train") -> DictConfig:
    """The configuration of a command line. A choice of options is composed once; values are set anew."""
    keys = [override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides]
    groups = tuple(
        o for o, key in zip(overrides, keys, strict=True) if (ROOT / "conf" / key).is_dir() or "hydra." in key
    )
    config = pickle.loads(chosen(name, groups))  # a fifth of the time of deepcopy
    values = [override for override in overrides if override not in groups]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    return config


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random Llama that reads and writes any text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(EXAMPLES / "toy", folder, dirs_exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture
def toy_model(toy: Path):
    from grpo.models.pretrained import Pretrained

    return Pretrained(str(toy)).model()


@pytest.fixture
def parts(toy, toy_model):
    """The engine and the renderer that `play` takes."""
    from grpo.engines.builtin.engine import TransformersEngine
    from grpo.env.chat_template import TemplateRenderer
    from grpo.models.pretrained import Pretrained

    engine = TransformersEngine()
    engine.load_weights(toy_model, 0)
    return engine, TemplateRenderer(Pretrained(str(toy)).tokenizer())


@pytest.fixture
def smoke(toy: Path, tmp_path: Path):
    """Overrides of a run that takes seconds, on our own examples, written to tmp_path."""

    def overrides(*more: str) -> list[str]:
        return [
            *f"""task=gsm8k task.path={EXAMPLES} model=path model.path={toy} debug=smoke callbacks=none
            forecast=false preflight=off max_tokens=8 optim.optimizer.lr=1e-3 output_dir={tmp_path}""".split(),
            *more,
        ]

    return overrides


def with_algorithm(*overrides: str) -> DictConfig:
    """The configuration of a command line. If it chooses an algorithm alone, that takes a third of the time."""
    files = [ROOT / "conf" / f"{override.replace('=', '/')}.yaml" for override in overrides]
    others = any(file.is_file() and "override /" in file.read_text() for file in files)
    if others or not all(override.lstrip("+~").startswith("algo") for override in overrides):
        return compose_config("output_dir=.", *overrides)
    config = compose_config("output_dir=.")
    given = overrides if any(override.startswith("algo=") for override in overrides) else ("algo=grpo", *overrides)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config.algo = compose(overrides=[f"+{o}" if o.startswith("algo=") else o for o in given]).algo
    return config


@functools.cache
def preset(*overrides: str) -> "Algorithm":
    """The algorithm of a command line, after the checks that train.py makes."""
    from grpo.apps.try_algorithm import check_algorithm

    config = with_algorithm(*overrides)
    plan = config.rollout
    try:
        algorithm = instantiate(config.algo)
        check_algorithm(algorithm, plan.prompts, plan.group_size, critic=bool(config.get("critic")))
    except (InstantiationException, UserError) as error:
        raise UserError(explain(error, "train")) from error
    return algorithm
