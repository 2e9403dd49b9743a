"""The list of docs/run.md: what each key does on a resume."""

from copy import deepcopy

import pytest
import yaml
from conftest import ROOT, compose_config
from omegaconf import OmegaConf

import grpo.training.checkpoints
from grpo.config import resuming
from grpo.config.resuming import check_resumed, resolved
from grpo.system.errors import UserError
from grpo.system.ranges import flat

TABLE = yaml.safe_load((ROOT / "tests/data/resumed_keys.yaml").read_text())
OPTIONS = "callbacks=[default,early_stopping] adapter=lora selection=replay sampler=pools algo/kl=loss".split()


def said_of(key: str) -> str:
    """Return what the table says of a key: the first line that names the beginning of it."""
    named = [(name, what) for what, rows in TABLE.items() for row in rows for name in row["keys"].split()]
    return next(what for name, what in named if name == "*" or key == name or key.startswith(f"{name}."))


def test_the_page_names_every_key_and_every_effect_has_a_test():
    page = (ROOT / "docs/run.md").read_text().partition("**Values of this command are in effect.**")[2]
    listed = page.partition("\n- Another callback")[0]
    for key in " ".join(row["keys"] for rows in TABLE.values() for row in rows).replace("*", "").split():
        assert f"`{key}`" in listed, key
    for title, what in (("Refused", "refused"), ("No effect on what is learned", "no effect on what is learned")):
        (line,) = (line for line in listed.split("\n- ") if line.startswith(f"**{title}**"))
        assert all(f"`{key}`" in line for row in TABLE[what] for key in row["keys"].split()), title
    for row in (row for rows in TABLE.values() for row in rows if "seen" in row):
        for test in row["seen"].split():
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test
    assert all("seen" in row for row in TABLE["in effect"] + TABLE["refused"])


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A function that compares a command with the run that it resumes: saved, config. The run has no files."""
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr(resuming, "chosen_changes", lambda changed, folder: changed)
    monkeypatch.setattr(grpo.training.checkpoints, "usable", lambda path: path)

    def compare(saved, config) -> None:
        monkeypatch.setattr(resuming, "saved_config", lambda folder: saved)
        config.ckpt_path = str(tmp_path / "checkpoints/00001.ckpt")
        check_resumed(config)

    return compare


@pytest.mark.slow
def test_the_keys_that_the_table_calls_refused_are_those_that_are(resumed, tmp_path):
    """One key of each two first words is changed alone."""
    saved = compose_config(f"output_dir={tmp_path}", *OPTIONS)
    leaves = [key for key in flat(resolved(saved)) if not key.rpartition(".")[2].startswith("_")]
    tried = {".".join(key.split(".")[:2]): key for key in reversed(leaves)}
    del tried["optim.groups"]  # see below
    for key in [*tried.values(), "optim.optimizer._target_"]:
        config = deepcopy(saved)
        OmegaConf.update(config, key, 7, merge=False, force_add=True)
        try:
            resumed(saved, config)
            line = ""
        except UserError as error:
            line = str(error)
        assert ("\n" not in line) and bool(line) == (said_of(key) == "refused"), (key, line)


@pytest.mark.parametrize(
    ("groups", "refused"), [({"*bias": {"lr": 0.1}}, False), ({"*norm*": {"lr": 0.1}}, True), (None, True)]
)
def test_other_groups_of_parameters_are_refused(resumed, tmp_path, groups, refused):
    """The state of the optimizer is kept by group. A new rate of the same group is a setting."""
    saved, config = (compose_config(f"output_dir={tmp_path}") for _ in range(2))
    OmegaConf.update(saved, "optim.groups", {"*bias": {"lr": 0.2}}, force_add=True)
    OmegaConf.update(config, "optim.groups", groups, merge=False, force_add=True)
    if refused:
        with pytest.raises(
            UserError, match=r"optim\.groups=.* \(was \['\*bias'\]\): the optimizer's state is kept by group"
        ):
            resumed(saved, config)
    else:
        resumed(saved, config)
