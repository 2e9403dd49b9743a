"""docs/from_trl.md has every field of TRL's GRPOConfig, and its keys exist."""

import dataclasses
import re
from collections import Counter

import pytest
from maps import check_keys, table

TABLE = table("from_trl.md", "TRL")


def test_every_field_has_one_line():
    config = pytest.importorskip("trl").GRPOConfig
    listed = Counter(field for fields, *_ in TABLE for field in re.findall(r"`(\w+)`", fields))
    assert set(listed) == {field.name for field in dataclasses.fields(config)}
    assert max(listed.values()) == 1


@pytest.mark.parametrize(("here", "remark"), [row[1:] for row in TABLE], ids=lambda text: text[:40])
def test_its_keys_exist(here, remark):
    check_keys(here, remark)
