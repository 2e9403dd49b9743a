"""Each key of the configuration is in the table of benchmarks/dead_keys.py, and has the effect that it has there."""

from pathlib import Path

import pytest
from dead_keys import TABLE, keys_in, trials, words_of
from helpers.programs import command
from omegaconf import OmegaConf

from grpo.config.composing import composed

TRIED = {key for _, _, key, _ in trials()}
NOT_TRIED = [key for part in ("nothing", "untried") for names in TABLE[part].values() for key in names.split()]


def test_each_key_of_the_demo_says_what_it_changes():
    """A new key belongs into a set-up of benchmarks/dead_keys.yaml, or into its `nothing` or `untried` with the reason."""
    assert keys_in(composed("train", ["output_dir=."])) - TRIED - {*NOT_TRIED} == set()


@pytest.mark.slow
def test_each_key_of_a_set_up_says_what_another_value_changes():
    leaves = set()
    for name in TABLE["setups"]:
        words = words_of(name, Path("folder"))
        config = composed("train", [*words, "output_dir=."])
        leaves |= keys_in(config)
        same = [key for of, _, key, value in trials() if of == name and OmegaConf.select(config, key) == value]
        assert not same, f"{name} has these values already"
    assert leaves - TRIED - {*NOT_TRIED} == set()
    assert {*NOT_TRIED} <= leaves and not TRIED & {*NOT_TRIED} and len(NOT_TRIED) == len({*NOT_TRIED})


@pytest.mark.slow
def test_keys_of_each_kind_do_what_they_say():
    words = ("demo: algo.policy_coef", "demo: algo.teacher.coef", "demo: rollout.stale", "demo: optim.offload")
    done = command("benchmarks/dead_keys.py", *words)
    assert done.returncode == 0 and "4 keys in" in done.stdout and "WRONG" not in done.stdout, done.stdout + done.stderr


def test_the_whole_table():
    done = command("benchmarks/dead_keys.py", seconds=7200)
    assert done.returncode == 0, done.stdout + done.stderr
