"""Rows of a dataset: where they come from, what is left out, and that no question is on two sides."""

import os

import pytest
from conftest import EXAMPLES, compose_config
from helpers.rows import write
from hydra.utils import instantiate

from grpo.data.rows import Made, fingerprint, point_of, side, spread
from grpo.extras.datasets.dataset import Dataset
from grpo.system.errors import UserError


def dataset(path, columns=("question", "answer"), **more) -> Dataset:
    return Dataset(str(path), columns, "gsm8k", **more)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", "", "is empty"),
        ("train.jsonl", '{"question": "q"}\n', "train: no column 'answer'; it has question"),
        ("train.jsonl", '{"question": "q", "answer"\n', "could not be read"),
        ("train.jsonl", '{"question": "a", "answer": NaN}\n', r"no rows for the split 'train': 1 read, 1 empty"),
        ("train.jsonl", '{"question": " ", "answer": "1"}\n', r"no rows for the split 'train': 1 read, 1 empty"),
        ("train.txt", "x", "no files for the split 'train'"),
        ("other.jsonl", "{}", "no files for the split 'train'"),
        ("retrained.jsonl", '{"question": "q", "answer": "1"}', "no files for the split 'train'"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        dataset(tmp_path).split("train")
    assert "\n" not in str(error.value)


ROW = '{"question": "q", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", "null\n" * 5, "line 1, is null: every row must be an object"),  # Arrow's reader crashes
        ("train.jsonl", f"{ROW}\n{ROW}null\n{ROW}", "line 4, is null"),
        ("train.jsonl", f"{ROW}[1, 2]\n", r"line 2, is \[1, 2\]"),
        ("train.json", "[3]", "row 1, is 3"),
        ("train.json", "null", "row 1, is null"),
        (
            "train.jsonl",
            '{"question": ' + "[" * 9999 + "]" * 9999 + "}",
            "could not be read: maximum recursion",
        ),  # crashes too
        ("train.jsonl", " \n\n", "is empty"),
        ("train.jsonl", ROW + ROW[:-9], "line 2: Unterminated string"),
        ("train.jsonl", ROW.replace("q", "é", 1).encode("latin-1"), "invalid continuation byte: save it as UTF-8"),
        (
            "train.jsonl",
            ROW.encode("utf-16"),
            "can't decode byte 0xff in position 0: invalid start byte: save it as UTF-8",
        ),
        ("train.csv", "é".encode("latin-1"), "could not be read: 'utf-8' codec .*: save it as UTF-8"),
        ("train.parquet", b"PAR1" + bytes(99), "could not be read: Parquet"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        dataset(tmp_path).split("train")
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:Length of header")
def test_a_file_that_is_none_is_refused_and_a_strange_one_is_read(tmp_path):
    (tmp_path / "train.jsonl").symlink_to("train.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe.jsonl", tmp_path / "zero.jsonl"):
        with pytest.raises(UserError, match="is a folder, a pipe, a device or a broken link: give a file"):
            dataset(path).split("train")
    (tmp_path / "a*[1].jsonl").write_bytes(b"\xef\xbb\xbf" + ROW.encode())  # with a BOM
    (tmp_path / "ab1.jsonl").write_text(ROW * 2)
    (tmp_path / "long.csv").write_text("question,answer\nq,1,5,6\nr,2\n")
    given = {name: dataset(tmp_path / name, splits={"train": "x"}, filters=[]) for name in ("a*[1].jsonl", "long.csv")}
    assert [[row["question"] for row in one.split("train")] for one in given.values()] == [["q"], ["q", "r"]]


def test_bad_paths_are_named(tmp_path):
    for path in (tmp_path / "missing", "./missing", "missing"):
        with pytest.raises(UserError, match="does not exist"):
            dataset(path).split("train")
    (tmp_path / "a_train.csv").write_text("question\nq\n")
    (tmp_path / "b_train.csv").write_text("question\nq\n")
    with pytest.raises(UserError, match="no files for the split"):
        dataset(tmp_path, ("question",)).split("train")
    (tmp_path / "retrained.csv").write_text("question\nno\n")  # no file of the split
    (tmp_path / "my_gsm8k_train.csv").write_text("question\nours\n")  # of several the one that has the task's name
    assert dataset(tmp_path, ("question",)).split("train")[0]["question"] == "ours"


def test_a_hub_that_cannot_be_reached_is_said():
    with pytest.raises(UserError, match=r"task\.path=nobody/nothing is no folder .* task\.path=FOLDER"):
        dataset("nobody/nothing").split("train")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"train_limit": 0}, "task.train_limit=0 must be an integer of at least 1, or null"),
        (
            {"splits": {"dev": "train"}},
            "task.splits={dev: train} must be a mapping, each key one of train, validation, test",
        ),
        (
            {"held_out": {"train": 0.1}},
            "task.held_out={train: 0.1} must be a mapping, each key one of validation, test",
        ),
        ({"held_out": {"validation": 1.2}}, "task.held_out="),
        ({"filters": ["short"]}, r"task.filters=\[short\] must be a list, each item one of empty, duplicate"),
        ({"streaming": True}, "set task.train_limit"),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    with pytest.raises(UserError, match=message):
        dataset(EXAMPLES, **more).split("train")


def test_a_split_that_is_not_there_is_said():
    with pytest.raises(UserError, match=r"no split 'validation': .* give train, test; task\.held_out\.validation=0\.1"):
        dataset(EXAMPLES).split("validation")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    import pandas as pd

    table = pd.DataFrame({"question": ["a", "b"], "answer": ["1", "2"], "more": [7, 8]})
    file = tmp_path / f"train.{kind}"
    if kind == "parquet":
        table.to_parquet(file)
    elif kind == "csv":
        table.to_csv(file, index=False)
    else:
        table.to_json(file, orient="records", lines=kind == "jsonl")
    rows = dataset(tmp_path).split("train")
    assert [(row["question"], str(row["answer"]), row["more"]) for row in rows] == [("a", "1", 7), ("b", "2", 8)]


def test_filters_say_what_they_remove(tmp_path, caplog):
    caplog.set_level("INFO")
    good = [{"question": f"q{i}", "answer": str(i)} for i in range(4)]
    bad = [{"question": "", "answer": "1"}, {"question": "x", "answer": None}, {"question": " q1 ", "answer": "1"}]
    write(tmp_path / "train.jsonl", [*good, *bad])
    rows = dataset(tmp_path).split("train")
    assert [row["question"] for row in rows] == ["q0", "q1", "q2", "q3"]
    assert "4 rows kept of 7; removed: 2 empty, 1 duplicate" in caplog.text
    assert len(dataset(tmp_path, filters=["empty"]).split("train")) == 5
    with pytest.raises(UserError, match=r"train row 5: no field 'question'; every row needs question, answer"):
        dataset(tmp_path, filters=[]).split("train")


def test_what_is_tested_is_never_trained_on(tmp_path, caplog):
    caplog.set_level("INFO")
    write(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(5)])
    write(tmp_path / "test.jsonl", [{"question": q, "answer": "1"} for q in ("q3", "q9")])
    assert [row["question"] for row in dataset(tmp_path).split("train")] == ["q0", "q1", "q2", "q4"]
    assert "removed: 1 held out" in caplog.text
    write(tmp_path / "validation.jsonl", [{"question": q, "answer": "1"} for q in ("q8", "q9")])
    ours = dataset(tmp_path, splits={split: split for split in ("train", "validation", "test")})
    assert [row["question"] for row in ours.split("validation")] == ["q8"]
    with pytest.raises(UserError, match="5 read, 5 held out"):  # the same file on both sides
        dataset(tmp_path / "train.jsonl").split("train")


def test_sides_are_a_matter_of_the_question_alone(tmp_path):
    rows = [{"question": f"question {i}", "answer": "1"} for i in range(2000)]
    write(tmp_path / "all.jsonl", rows)
    shares = {"validation": 0.05, "test": 0.1}
    found = {
        split: {row["question"] for row in dataset(tmp_path / "all.jsonl", held_out=shares).split(split)}
        for split in ("train", "validation", "test")
    }
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 2000
    assert 160 < len(found["test"]) < 240 and 70 < len(found["validation"]) < 130  # 10 and 5 %, more or less
    write(tmp_path / "all.jsonl", rows[:1000:-3])  # fewer, in another order
    fewer = dataset(tmp_path / "all.jsonl", held_out=shares)
    for split, questions in found.items():
        assert {row["question"] for row in fewer.split(split)} <= questions
    # pinned: a question must not change sides between versions
    assert [side(f"question {i}", shares) for i in range(30)].count("train") == 26
    assert side("  question   7 ", shares) == side("question 7", shares)


def test_validation_comes_from_the_train_rows_and_test_stays_what_it_was(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(100)])
    write(tmp_path / "test.jsonl", [{"question": f"t{i}", "answer": "1"} for i in range(20)])
    ours = dataset(tmp_path, held_out={"validation": 0.2, "test": 0.5})  # the folder has a test file: that is test
    train, validation, test = (ours.split(split) for split in ("train", "validation", "test"))
    assert len(train) + len(validation) == 100 and 10 < len(validation) < 30
    assert [row["question"] for row in test] == [f"t{i}" for i in range(20)]


def test_limits_count_what_is_left(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": q, "answer": "1"} for q in ("", "a", "a", "b", "c")])
    assert [row["question"] for row in dataset(tmp_path, train_limit=2).split("train")] == ["a", "b"]


def test_streaming_reads_as_much_as_it_needs(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": f"q{i % 50}", "answer": "1"} for i in range(1000)])
    rows = dataset(tmp_path, streaming=True, train_limit=10).split("train")
    assert [row["question"] for row in rows] == [f"q{i}" for i in range(10)]


def test_a_stream_does_not_leak_and_misses_columns_at_once(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(20)])
    write(tmp_path / "test.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(0, 20, 2)])
    stream = dataset(tmp_path, streaming=True, train_limit=5, test_limit=3)
    assert [row["question"] for row in stream.split("train")] == ["q1", "q3", "q5", "q6", "q7"]  # q0, q2, q4 are tested
    with pytest.raises(UserError, match="no column 'prompt'; it has question, answer"):
        dataset(tmp_path, ("prompt",), streaming=True, train_limit=5).split("train")
    with pytest.raises(UserError, match=r"set task\.validation_limit"):
        dataset(tmp_path, streaming=True, train_limit=5, held_out={"validation": 0.5}).split("validation")
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question"\n')
    with pytest.raises(UserError, match="could not be read"):
        dataset(tmp_path / "bad.jsonl", streaming=True, train_limit=5).split("train")


def test_examples_are_spread_over_all_of_them():
    assert [spread(range(10), most) for most in (4, 10, 99, 0)] == [[0, 3, 6, 9], [*range(10)], [*range(10)], []]


def test_rows_that_are_made_are_indexed_as_a_list_is():
    squares = Made(5, lambda i: i * i)
    assert (squares[-1], squares[-2:], squares[::2]) == (16, [9, 16], [0, 4, 16])
    for index in (5, -6):
        with pytest.raises(IndexError):
            squares[index]


def test_objects_with_the_same_attributes_have_one_fingerprint():
    class Board:
        def __init__(self, size: int) -> None:
            self.size = size

    one, same, other = (fingerprint({"board": board}) for board in (Board(3), Board(3), Board(4)))
    assert one == same != other


def test_a_split_that_the_folder_lacks_is_held_out_of_train(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(100)])
    ours = dataset(tmp_path, held_out={"test": 0.2})
    assert len(ours.split("train")) + len(ours.split("test")) == 100
    with pytest.raises(UserError, match="no files for the split 'test'"):
        dataset(tmp_path).split("test")
    none = dataset(tmp_path, splits={"train": "train", "validation": None, "test": None})
    with pytest.raises(UserError, match=r"no split 'test': .* give train; task\.held_out\.test=0\.1"):
        none.split("test")


def test_a_tenth_of_six_rows_is_one_row(tmp_path):
    """By their hashes all of them would be train rows; the one with the lowest hash is held out."""
    rows = [{"question": f"q{i}", "answer": "1"} for i in (2, 3, 5, 6, 8, 9)]
    assert min(point_of(row["question"]) for row in rows) > 0.1
    write(tmp_path / "rows.jsonl", rows)
    lowest = min(rows, key=lambda row: point_of(row["question"]))["question"]
    ours = dataset(tmp_path / "rows.jsonl", held_out={"test": 0.1})
    assert [row["question"] for row in ours.split("train")] == [
        row["question"] for row in rows if row["question"] != lowest
    ]
    assert [row["question"] for row in ours.split("test")] == [lowest]
    write(tmp_path / "rows.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"no rows for the split 'test': .* or give more rows"):
        dataset(tmp_path / "rows.jsonl", held_out={"test": 0.1}).split("test")


def test_what_the_messages_say_to_set_can_be_set(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": f"q{i}", "answer": "1"} for i in range(100)])
    config = compose_config(
        "task=gsm8k", f"task.path={tmp_path}", "task.held_out.validation=0.1", "task.held_out.test=0.2"
    )
    task = instantiate(config.task)
    assert sum(len(task.examples(split)) for split in ("train", "validation", "test")) == 100
    compose_config("task=gsm8k", "task.splits.test=null", "task.splits.validation=dev")
