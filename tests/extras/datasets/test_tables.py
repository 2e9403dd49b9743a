"""Values of a file arrive as they are written: tests/data/written_values.md, and files that are valid but unusual."""

import re
from datetime import date
from decimal import Decimal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.project import table

from grpo.data.rows import at, key_of
from grpo.extras.datasets.dataset import Dataset
from grpo.extras.datasets.glance import columns_in
from grpo.extras.datasets.tables import line_of_csv, read_file, written_as
from grpo.extras.preflight.written import agrees, golds_in, texts_only
from grpo.system.errors import UserError

TABLE = [
    (re.findall("`([^`]*)`", texts), where, read)
    for texts, where, read in table("tests/data/written_values.md", "written")
]
KINDS = {kind: [row for row in TABLE if kind in row[1].split(", ")] for kind in ("JSONL", "JSON", "CSV", "Parquet")}


def written_file(folder, texts, kind: str):
    """Write a file whose rows have these texts as right answers."""
    if kind.startswith("Parquet"):
        name = kind.partition(", ")[2]
        to = pa.decimal128(10, 2) if name.startswith("decimal") else pa.type_for_alias(name)
        given = pa.array([None if text == " " else text for text in texts])
        values = given.cast(pa.float64()).cast(to) if name == "halffloat" else given.cast(to)
        pq.write_table(pa.table({"q": [f"{i}?" for i in range(len(texts))], "gold": values}), folder / "train.parquet")
        return folder / "train.parquet"
    if kind.startswith("CSV"):
        quoted = [text.strip().replace('"', '""') for text in texts]
        content = "q,gold\n" + "".join(f'{i}?,"{text}"\n' for i, text in enumerate(quoted))
    else:
        rows = [f'{{"q": "{i}?", "gold": {text}}}' for i, text in enumerate(texts)]
        content = "\n".join(rows) if kind == "JSONL" else f"[{','.join(rows)}]"
    file = folder / f"train.{kind.partition(',')[0].lower()}"
    file.write_text(content, encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_the_page(tmp_path, kind):
    """Each value and its type; and what other readers find in the file is the same."""
    for texts, where, expected in KINDS[kind]:
        said = "task.numbers" in where
        file = written_file(tmp_path, texts, where if kind == "Parquet" else kind)
        read = [row["gold"] for row in Dataset(str(tmp_path), ("q",), numbers=["gold"] * said).split("train")]
        wanted = [eval(one, {"Decimal": Decimal, "date": date}) for one in re.findall("`([^`]*)`", expected)]
        assert [(type(one), one) for one in read] == [(type(one), one) for one in wanted], (texts, where)
        found = golds_in(file, "q", "gold", [f"{i}?" for i in range(len(read))])
        for i, one in enumerate(read):
            assert said or all(agrees(one, text) for text in found.get(key_of(texts_only(f"{i}?")), [])), (texts, found)
        file.unlink()


def test_types_are_those_of_the_whole_file(tmp_path):
    """A column that is null in the first ten megabytes, one that appears after them, and structs with fields of their own."""
    long, file = "x" * 30_000, tmp_path / "train.jsonl"
    rows = [f'{{"q": "{i}? {long}", "gold": {"null" if i < 395 else i}, "info": {{"a{i}": 1}}}}' for i in range(400)]
    file.write_text("\n\n".join(rows[:-1]) + '\n{"q": "last?", "gold": "7", "late": 2.5}\n')
    rows = Dataset(str(file), ("q",), splits={"train": "train"}).split("train")
    assert len(rows) == 400 and rows[0] == {"q": f"0? {long}", "gold": None, "info": {"a0": 1}, "late": None}
    assert rows[396]["gold"] == 396 and rows[-1] == {"q": "last?", "gold": "7", "info": None, "late": 2.5}
    stream = Dataset(str(file), ("q",), splits={"train": "train"}, streaming=True, train_limit=3).split("train")
    assert [*stream] == rows[:3]


def test_a_csv_file_of_a_spreadsheet_has_semicolons_and_letters_of_its_language(tmp_path):
    file = tmp_path / "größe.csv"
    file.write_text('\ufeffFrage;Lösung;Maß\n"2 + 3; wie viel?";5;1,5\n\n4?;;m\n', encoding="utf-8")
    wanted = [{"Frage": "2 + 3; wie viel?", "Lösung": 5, "Maß": "1,5"}, {"Frage": "4?", "Lösung": None, "Maß": "m"}]
    names, has = columns_in(file)
    assert names == ["Frage", "Lösung", "Maß"] and has("Lösung")
    for streaming in (False, True):
        rows = Dataset(str(file), ("Frage",), splits={"train": "train"}, streaming=streaming, train_limit=2)
        assert [*rows.split("train")] == [
            row | ({"Lösung": "5"} if streaming and row["Lösung"] else {}) for row in wanted
        ]
    assert read_file(file).where(1) == f"{file}, line 4"
    assert golds_in(file, "Frage", "Lösung", ["4?", wanted[0]["Frage"]]) == {
        key_of(texts_only("4?")): [""],
        key_of(texts_only("2 + 3; wie viel?")): ["5"],
    }
    file.write_text("a;b,c\n1;2,3\n")  # a comma in the first line parts its columns
    assert columns_in(file)[0] == ["a;b", "c"]


BAD = [  # file, content, columns, further arguments of Dataset, the line
    ("a.jsonl", '{"q": "1?"}\n\n{"q": 5}\n', ("q",), {}, r"a\.jsonl, line 3, column 'q': no text$"),
    ("a.json", '[{"q": "1?"}, {"q": 5}]', ("q",), {}, r"a\.json, row 2, column 'q': no text$"),
    ("a.csv", 'q,gold\n"1\n?",2\n\n7,1\n', ("q",), {}, r"a\.csv, line 5, column 'q': no text$"),
    (
        "a.csv",
        "q,gold\n1?,\n",
        ("q", "gold"),
        {"filters": []},
        r"a\.csv, line 2, train row 1: no field 'gold'; every row",
    ),
    (
        "a.csv",
        "q,n\n1?,NA\n2?,x\n",
        ("q",),
        {"numbers": ["n"]},
        r"a\.csv, line 3, column 'n': 'x' is no number; correct",
    ),
    ("a.csv", "q\nNA\n7\n", ("q",), {"filters": []}, r"a\.csv, line 3, column 'q': no text$"),  # NA is a text
    ("a.csv", "q,n\n1?,2\n", ("q",), {"numbers": ["m"]}, r"a\.csv has no column 'm'; it has q, n"),
    ("a.csv", "q,n\n1?,2\n1?,2,3\n", ("q",), {}, r"a\.csv could not be read: .* Expected 2 fields in line 3, saw 3"),
    ("a.csv", "q\n1?\n\xe9\n", ("q",), {}, r"a\.csv could not be read: 'utf-8' codec .*, in line 3: save it as UTF-8"),
    ("a.jsonl", '{"q": "1?"}', ("q",), {"numbers": ["q"]}, "is for CSV files"),
    (
        "a.jsonl",
        '{"q": "1?"}\n{"q": "\xe9"}',
        ("q",),
        {},
        r"a\.jsonl could not be read: line 2: 'utf-8' codec .* UTF-8",
    ),
    ("a.jsonl", '{"q": "1?"}\n{"q": "2?", "r": 1}', ("q", "r"), {"filters": []}, "line 1, .*: no field 'r'"),
    ("a.jsonl", '{"q": "1?", "r": {"a": 1}}', ("q", "r.b"), {}, "1 read, 1 empty; no row has 'r.b'"),
    ("a.jsonl", '{"q": "1?"}', ("q", "s.b"), {}, "no column 's'; it has q"),
]


@pytest.mark.parametrize(("name", "content", "columns", "more", "line"), BAD)
def test_a_refusal_names_file_line_and_column(tmp_path, name, content, columns, more, line):
    def form(question):
        if not isinstance(question, str) or question == "7":
            raise UserError("no text")

    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=line) as refused:
        Dataset(str(tmp_path / name), columns, splits={"train": "train"}, form=form, **more).split("train")
    assert "\n" not in str(refused.value)


def test_half_a_character_is_a_question_mark(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"q": "a\\ud800b", "gold": 0.1234567890123456789}\n{"q": "\\ud83d\\ude00", "gold": 1}\n'
    )
    rows = Dataset(str(tmp_path), ("q",)).split("train")
    assert [*rows] == [{"q": "a?b", "gold": "0.1234567890123456789"}, {"q": "😀", "gold": 1}]


def test_texts_of_a_column_are_numbers_if_python_writes_them_so():
    columns = {("7", "", "-8"): int, ("7", "08"): str, ("0.5", "2.0"): float, ("0.5", "2.50"): str, ("True",): bool}
    columns |= {("1_000",): str, ("+7",): str, ("nan",): str, ("1e5",): str}
    made = {texts: written_as([pa.array(texts)])(texts[0]) for texts in columns}
    assert {texts: type(value) for texts, value in made.items()} == columns


def test_fields_of_columns_and_lines_of_records(tmp_path):
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "d": None}
    assert [at(row, name) for name in ("a.b.c", "a.b", "d.e", "x", "a.x")] == [1, 2, None, None, None]
    (tmp_path / "a.csv").write_text('q,r\n\n"1\n2",3\n  \n4,5\n')
    assert [line_of_csv(tmp_path / "a.csv", place) for place in (0, 1)] == [3, 6]
    assert [(str(one["q"]), one["r"]) for one in pd.read_csv(tmp_path / "a.csv").to_dict("records")][1] == ("4", 5)


def test_what_was_read_wrongly_does_not_agree():
    pairs = [(9007199254740992.0, "9007199254740993"), (0.1, "0.10000000149011612"), (7, "007x"), ("7", "007")]
    pairs += [(1e5, "1e6"), ([1, 2.0], ["1", "2.5"]), ({"a": 1}, {"a": "1", "b": "2"}), (None, "NA"), ("1", None)]
    assert not [pair for pair in pairs if agrees(*pair)]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_is_no_pattern(tmp_path, kind, streaming):
    """A folder and a file with brackets, beside a file that the brackets would fit."""
    folder = tmp_path / "run[12]"
    (tmp_path / "run1").mkdir()
    folder.mkdir()
    for place, gold in ((folder, "right"), (tmp_path / "run1", "wrong")):
        frame = pd.DataFrame({"q": ["1?"], "gold": [gold]})
        file = place / f"train.{kind}"
        write = {"csv": frame.to_csv, "parquet": frame.to_parquet}.get(kind)
        write(file, index=False) if write else frame.to_json(file, orient="records", lines=True)
    rows = Dataset(str(folder), ("q",), streaming=streaming, train_limit=1).split("train")
    assert [row["gold"] for row in rows] == ["right"]
