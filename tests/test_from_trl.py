"""docs/from_trl.md has every field of TRL's GRPOConfig, and its keys exist."""

import dataclasses
import functools
import re
from collections import Counter

import pytest
from conftest import ROOT, compose_config
from omegaconf import OmegaConf

TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "from_trl.md").read_text().splitlines()
    if line.startswith("| `")
]
ENGINES = ("vllm", "vllm_server", "transformers")  # a key of an engine is a key of one of these


@functools.cache
def configs() -> list:
    return [compose_config("output_dir=.", f"engine={e}", "algo/kl=loss", "task=gsm8k") for e in ENGINES]


def test_every_field_has_one_line():
    config = pytest.importorskip("trl").GRPOConfig
    listed = Counter(field for fields, *_ in TABLE for field in re.findall(r"`(\w+)`", fields))
    assert set(listed) == {field.name for field in dataclasses.fields(config)}
    assert max(listed.values()) == 1


@pytest.mark.parametrize(("here", "remark"), [row[1:] for row in TABLE], ids=lambda text: text[:40])
def test_its_keys_exist(here, remark):
    if here in ("always", "none"):
        assert here == "always" or len(remark) > 10
        return
    for word in re.findall(r"`([^`]+)`", here) + re.findall(r"`([+~]?[\w./]+=[^`]*)`", remark):
        key, assigned, _ = word.partition("=")
        if key in ("train.py", "eval.py"):
            assert (ROOT / key).is_file()
        elif assigned and "..." not in word:
            engine = [f"engine={engine}" for engine in ENGINES[:1] if "engine.args" in key]
            compose_config("output_dir=.", *engine, word)
        elif not (ROOT / "conf" / key).is_dir() and not key.lstrip("+").startswith(("hydra", "logger")):
            assert any(OmegaConf.select(config, key, default=TABLE) is not TABLE for config in configs()), key
