"""The table of docs/run.md: what each key does on a resume."""

import pytest
import yaml
from conftest import ROOT, compose_config
from omegaconf import OmegaConf

import grpo.training.checkpoints
from grpo.config import resuming
from grpo.config.resuming import check_resumed
from grpo.system.errors import UserError

TABLE = yaml.safe_load((ROOT / "tests/data/resumed_keys.yaml").read_text())


def table() -> str:
    """Return the table of the page."""
    lines = ["| keys | on a resume | |", "|---|---|---|"]
    for what, rows in TABLE.items():
        for row in rows:
            keys = ", ".join(f"`{key}`" if key != "*" else "all others" for key in row["keys"].split())
            lines.append(f"| {keys} | {what} | {row['how']} |")
    return "\n".join(lines)


def test_the_page_has_the_table_and_every_effect_a_test():
    assert table() in (ROOT / "docs/run.md").read_text(), f"docs/run.md lacks this table:\n{table()}"
    for row in (row for rows in TABLE.values() for row in rows if "seen" in row):
        file, _, name = row["seen"].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), row["seen"]
    assert all("seen" in row for row in TABLE["in effect"] + TABLE["refused"])


@pytest.mark.parametrize(
    ("groups", "refused"), [({"*bias": {"lr": 0.1}}, False), ({"*norm*": {"lr": 0.1}}, True), (None, True)]
)
def test_other_groups_of_parameters_are_refused(tmp_path, monkeypatch, groups, refused):
    """The state of the optimizer is kept by group. A new rate of the same group is a setting."""
    (tmp_path / "config.yaml").touch()
    saved, config = (compose_config(f"output_dir={tmp_path}") for _ in range(2))
    OmegaConf.update(saved, "optim.groups", {"*bias": {"lr": 0.2}}, force_add=True)
    OmegaConf.update(config, "optim.groups", groups, merge=False, force_add=True)
    config.ckpt_path = str(tmp_path / "checkpoints/00001.ckpt")
    monkeypatch.setattr(resuming, "saved_config", lambda folder: saved)
    monkeypatch.setattr(resuming, "chosen_changes", lambda changed, folder: changed)
    monkeypatch.setattr(grpo.training.checkpoints, "usable", lambda path: path)
    if refused:
        with pytest.raises(
            UserError, match=r"optim\.groups=.* \(was \['\*bias'\]\): the optimizer's state is kept by group"
        ):
            check_resumed(config)
    else:
        check_resumed(config)
