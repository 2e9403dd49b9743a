"""docs/from_trl.md has every field of TRL's GRPOConfig, and its keys and commands exist."""

import re
import shlex
from pathlib import Path

import from_trl  # benchmarks/from_trl.py
import pytest
from click.testing import CliRunner
from conftest import ROOT
from huggingface_hub.cli import hf
from huggingface_hub.errors import OfflineModeIsEnabled
from maps import check_keys

TABLE = from_trl.rows(from_trl.PAGE.read_text())


def test_every_field_has_one_row_with_an_answer():
    pytest.importorskip("trl")
    page = from_trl.PAGE.read_text()
    assert from_trl.faults(page) == [] and from_trl.mended(page) == page


def test_a_new_field_and_a_lost_one_are_found_and_mended():
    pytest.importorskip("trl")
    page = (
        from_trl.PAGE.read_text()
        .replace("| `beta` |", "| `alpha`, `epsilon` |")
        .replace("| `data_seed` |", "| `old` |")
    )
    assert {"beta has no row", "data_seed has no row", "epsilon has 2 rows"} < {*from_trl.faults(page)}
    assert f"alpha is no field of TRL {from_trl.version()}" in from_trl.faults(page)
    mended = from_trl.mended(page)
    open_rows = [fields for fields, here, _ in from_trl.rows(mended) if here == "?"]
    assert sorted(open_rows) == ["`beta`", "`data_seed`"] and "`alpha`" not in mended and "`old`" not in mended
    assert sorted(from_trl.faults(mended))[0] == "`beta` has no answer"


@pytest.mark.parametrize("file", ["from_trl.md", "logging.md"])
def test_the_commands_that_publish_a_policy_work_up_to_the_network(tmp_path, file):
    """hf takes the arguments and the folder, which is a link, and then wants to reach the hub, which it may not here."""
    lines = re.findall(r"hf upload [^`#\n]+", (ROOT / "docs" / file).read_text())
    assert lines
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "README.md").touch()
    for line in lines:
        (link := tmp_path / Path(shlex.split(line)[3]).name).symlink_to("policy")
        given = [str(link) if word.startswith("RUN/") else word for word in shlex.split(line)[1:]]
        done = CliRunner().invoke(hf.app, given)
        assert isinstance(done.exception, OfflineModeIsEnabled) and "repos/create" in str(done.exception), done.output


@pytest.mark.parametrize(("here", "remark"), [row[1:] for row in TABLE], ids=lambda text: text[:40])
def test_its_keys_exist(here, remark):
    check_keys(here, remark)
