"""Files are written completely or not at all, and JSON is strict."""

import json
import math

import pytest

from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action
from grpo.rollout.samples_table import text
from grpo.system.files import replacing, strict_json, write_json, write_text


def test_a_file_is_replaced_when_all_of_it_is_there(tmp_path):
    file = tmp_path / "folder" / "a.txt"
    write_text(file, "é\n")
    with replacing(file) as new:
        new.write_bytes(b"second")
        assert file.read_bytes() == "é\n".encode()
    assert file.read_bytes() == b"second"
    assert list(file.parent.iterdir()) == [file]


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"name": "Zoë"})
    with pytest.raises(ZeroDivisionError), replacing(file) as new:
        new.write_text("half")
        _ = 1 / 0
    assert file.read_text(encoding="utf-8") == '{\n  "name": "Zoë"\n}\n'


def test_what_goes_out_is_json_that_every_parser_reads(tmp_path):
    odd = {"a": [math.nan, (math.inf, 1.5)], 1: {"b": -math.inf}, "c": "é", "d": True}
    write_json(tmp_path / "a.json", odd)
    written = (tmp_path / "a.json").read_text(encoding="utf-8")
    right = {"a": [None, [None, 1.5]], "1": {"b": None}, "c": "é", "d": True}
    assert (
        json.loads(written, parse_constant=pytest.fail)
        == json.loads(strict_json(odd), parse_constant=pytest.fail)
        == right
    )


def test_what_a_tool_and_a_table_tell_is_strict_json():
    from grpo.extras.tools.env import ToolEnv

    def measure() -> dict:
        """Measure."""
        return {"mean": math.nan}

    state = ToolEnv([Message("user", "?")], [measure]).step(
        Action(Message("assistant", "", (ToolCall("measure", {}),)))
    )
    assert state.messages[-1].content == '{"mean": null}'
    assert text({"parts": math.inf}) == '{"parts": null}'
