"""The commands of tests/parity/commands.yaml, and the names that their facts use: what the terminal had, what a run left."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np  # noqa: F401 - the facts name it
import pandas as pd
import yaml
from conftest import ROOT
from pytest import approx  # noqa: F401
from safetensors.torch import load_file

import grpo

TABLE = yaml.safe_load((ROOT / "tests" / "parity" / "commands.yaml").read_text())
WORDS = {}
for name, text in TABLE["words"].items():
    WORDS[name] = Template(text).substitute(WORDS)


@dataclass
class Left:
    """The terminal after the commands. out: both streams. codes: the exit code of each."""

    out: str
    codes: list[int]

    @property
    def lines(self) -> list[str]:
        return self.out.strip().splitlines()

    def has(self, *texts: str) -> bool:
        return all(text in self.out for text in texts)


class Command:
    """Lines that are typed in order, and what is true after them."""

    def __init__(self, run, shows, after=(), ends=None, refused=False):
        self.lines = [Template(line).safe_substitute(WORDS) for line in run]
        self.shows, self.after, self.refused = shows, after, refused
        self.codes = ends or [0 for line in run if not line.endswith("&")]


COMMANDS = {name: Command(**command) for name, command in TABLE["commands"].items()}


def holds(fact: str, left: Left) -> bool:
    return eval(fact, globals() | {"left": left})


def metrics(run: str) -> pd.DataFrame:
    return grpo.load_run(run).metrics


def values(run: str, metric: str) -> list[float]:
    return metrics(run)[metric].dropna().tolist()


@functools.cache
def samples(run: str) -> pd.DataFrame:
    return grpo.load_run(run).samples()


def config(run: str, key: str) -> object:
    return functools.reduce(lambda node, name: node[name], key.split("."), grpo.load_run(run).config)


def groups(run: str) -> list[pd.DataFrame]:
    return [group for _, group in samples(run).groupby(["rollout", "prompt_index"])]


def read(file: str) -> str:
    return Path(file).read_text()


def result(folder: str, metric: str) -> float:
    return json.loads(read(f"{folder}/metrics.json"))[f"eval/{metric}"]["value"]


def weights(folder: str) -> dict:
    return load_file(f"{folder}/model.safetensors")


def moved(run: str, base: str = "toy") -> float:
    """The norm of what a run added to the weights of its model."""
    before, after = weights(base), weights(f"{run}/checkpoints/last")
    return sum((after[name] - before[name]).square().sum().item() for name in before) ** 0.5


def scalars(run: str, metric: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(f"{run}/tensorboard")
    events.Reload()
    return [event.value for event in events.Scalars(metric)]


def first_messages(run: str) -> list[list[dict]]:
    return samples(run)["messages"].map(json.loads).tolist()


def prompts(left: Left) -> list[list[int]]:
    """The prompts that parts.Telling printed."""
    printed = [line[8:].translate(str.maketrans("()", "[]")) for line in left.lines if line.startswith("prompts ")]
    return [ids for line in printed for ids in json.loads(line)]
