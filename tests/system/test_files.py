"""Files are written completely or not at all."""

import pytest

from grpo.system.files import replacing, write_json, write_text


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
