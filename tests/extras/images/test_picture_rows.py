"""Pictures in rows: the columns, parts and marks that datasets have, read late, in the right places."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo.env.messages import Message
from grpo.env.pictures import Picture
from grpo.extras.images import files
from grpo.system.errors import UserError
from tasks.jsonl import Jsonl

ROWS = {"splits": {"train": "train"}, "held_out": {}}
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


def png(colour: str, size: tuple[int, int] = (8, 6)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


RED, BLUE = Picture(png("red")), Picture(png("blue"))
URL = f"data:image/png;base64,{base64.b64encode(RED.data).decode()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two pictures beside the rows."""
    (tmp_path / "pictures").mkdir()
    for colour in COLOURS:
        (tmp_path / "pictures" / f"{colour}.png").write_bytes(png(colour))
    return tmp_path


def task_of(folder: Path, *rows, **settings) -> Jsonl:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Jsonl(str(folder), "longer", **ROWS | settings)


def asked(task: Jsonl, place: int = 0) -> tuple[Message, ...]:
    return task.build(task.examples("train")[place]).start().messages


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def of_text(text: str) -> dict:
    return {"type": "text", "text": text}


PLACE = {"type": "image"}
FORMS = [  # a row; the text of the user's message; its pictures
    ({"prompt": "What?", "image": "pictures/red.png"}, "<image>What?", [RED]),
    (
        {"prompt": "What?", "images": ["pictures/red.png", {"path": "pictures/blue.png"}]},
        "<image><image>What?",
        [RED, BLUE],
    ),
    ({"prompt": "What is <image>?", "image": URL}, "What is <image>?", [RED]),
    ({"prompt": "<image> or <image>?", "images": [URL, "pictures/blue.png"]}, "<image> or <image>?", [RED, BLUE]),
    ({"prompt": user(of_text("A "), PLACE, of_text(" B")), "images": ["pictures/blue.png"]}, "A <image> B", [BLUE]),
    ({"prompt": user(PLACE | {"text": None}, of_text("A")), "image": "pictures/blue.png"}, "<image>A", [BLUE]),
    ({"prompt": user({"type": "image_url", "image_url": {"url": URL}}, of_text("A"))}, "<image>A", [RED]),
    ({"prompt": user({"type": "image_url", "image_url": URL})}, "<image>", [RED]),
    (
        {"prompt": user(PLACE | {"path": "pictures/red.png"}, PLACE), "images": ["pictures/blue.png"]},
        "<image><image>",
        [RED, BLUE],
    ),
    (
        {"prompt": [{"role": "user", "content": "<image>Find x"}], "images": ["pictures/red.png"]},
        "<image>Find x",
        [RED],
    ),
    ({"prompt": [{"role": "user", "content": "Find x"}], "images": ["pictures/red.png"]}, "<image>Find x", [RED]),
    ({"prompt": "the <image> tag of HTML"}, "the <image> tag of HTML", []),
    ({"prompt": user(of_text("A"), of_text("B")), "images": []}, "A\nB", []),
    ({"prompt": "A", "images": None}, "A", []),
]


@pytest.mark.parametrize(("row", "text", "pictures"), FORMS, ids=range(len(FORMS)))
def test_every_form_of_a_row_gives_the_same_messages(folder, row, text, pictures):
    assert asked(task_of(folder, row)) == (Message("user", text, pictures=tuple(pictures)),)


def test_pictures_go_to_the_messages_that_have_their_places(folder):
    """Marks of several messages take the column's pictures in order, whatever the roles between them say."""
    talk = [
        {"role": "system", "content": "An <image> is a picture."},
        {"role": "user", "content": "<image> first"},
        {"role": "assistant", "content": "an <image>, I see"},
        *user(of_text("and "), PLACE),
    ]
    messages = asked(task_of(folder, {"prompt": talk, "images": ["pictures/blue.png", "pictures/red.png"]}))
    assert [message.pictures for message in messages] == [(), (BLUE,), (), (RED,)]
    assert messages[-1].content == "and <image>"


def test_a_template_says_where_a_picture_goes_and_a_system_message_stays_before_it(folder):
    settings = {"template": "{prompt} <image> Answer:", "system": "Be short."}
    messages = asked(task_of(folder, {"prompt": "What?", "image": "pictures/red.png"}, **settings))
    assert messages == (Message("system", "Be short."), Message("user", "What? <image> Answer:", pictures=(RED,)))


def test_a_column_of_another_name_and_none(folder):
    row = {"prompt": "What?", "image": "pictures/red.png", "extra_info": {"photo": "pictures/blue.png"}}
    assert asked(task_of(folder, row, images="extra_info.photo"))[0].pictures == (BLUE,)
    assert asked(task_of(folder, row, images=None)) == (Message("user", "What?"),)
    with pytest.raises(UserError, match="no column 'photo'; it has prompt, image, extra_info"):
        task_of(folder, row, images="photo").examples("train")


def test_parquet_as_datasets_writes_it_and_as_others_do(folder, monkeypatch):
    """Images of PIL become struct{bytes, path}. They are not decoded with the rows, and reward functions get their bytes."""
    import datasets

    pictures = [Image.new("RGB", (8, 6), colour) for colour in COLOURS.values()]
    rows = [{"prompt": "one", "images": pictures[:1]}, {"prompt": "two", "images": pictures}]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    plain = folder / "plain"
    plain.mkdir()
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    column = pa.array(
        [[{"bytes": RED.data, "path": None}], [{"bytes": None, "path": "../pictures/blue.png"}]], pa.list_(kind)
    )
    pq.write_table(pa.table({"prompt": ["<image>one", "<image>two"], "images": column}), plain / "train.parquet")
    monkeypatch.setattr(datasets.Image, "decode_example", None)
    task = Jsonl(str(folder), "longer", **ROWS)
    assert asked(task)[0].pictures == (RED,) and asked(task, 1)[0].pictures == (RED, BLUE)
    assert task.examples("train")[0]["images"][0]["bytes"] == RED.data
    task = Jsonl(str(plain), "longer", **ROWS)
    assert asked(task) == (Message("user", "<image>one", pictures=(RED,)),) and asked(task, 1)[0].pictures == (BLUE,)


def test_a_stream_is_not_decoded(folder, monkeypatch):
    import datasets

    rows = [{"prompt": f"{i}", "image": Image.new("RGB", (8, 6), COLOURS["red"])} for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    monkeypatch.setattr(datasets.Image, "decode_example", None)
    task = Jsonl(str(folder), "longer", streaming=True, train_limit=2, **ROWS)
    assert [asked(task, i)[0].pictures for i in (0, 1)] == [(RED,), (RED,)]


def test_the_same_words_about_another_picture_are_another_question(folder):
    """The filter for duplicates and the held-out share look at pictures too: of 40 rows with one question none is lost, and the
    test split gets some of them, not all."""
    for i in range(40):
        (folder / f"{i}.png").write_bytes(png("red", (8, 8 + i)))
    rows = [{"prompt": "How many?", "image": f"{i}.png"} for i in range(40)]
    settings = {"held_out": {"test": 0.25}, "splits": {"train": "train"}}
    task = task_of(folder, *rows, rows[0], **settings)
    train, test = ([row["image"] for row in task.examples(split)] for split in ("train", "test"))
    assert len(train) + len(test) == 40 and not {*train} & {*test} and 4 <= len(test) <= 16
    # bytes in a table: the same
    (folder / "train.jsonl").unlink()
    column = [{"bytes": (folder / f"{i}.png").read_bytes()} for i in [*range(40), 0]]
    pq.write_table(pa.table({"prompt": ["How many?"] * 41, "image": column}), folder / "train.parquet")
    task = Jsonl(str(folder), "longer", **settings)
    assert len(task.examples("train")) + len(task.examples("test")) == 40


def test_pictures_are_read_when_an_environment_is_built(folder, monkeypatch):
    """The rows are looked at without reading whole files, and each picture is decoded once."""
    rows = [{"prompt": f"{i}", "image": f"pictures/{'red' if i % 2 else 'blue'}.png"} for i in range(20)]
    task = task_of(folder, *rows)
    read = []
    monkeypatch.setattr(files, "picture_from", lambda value: read.append(value) or Picture(Path(value).read_bytes()))
    task.examples("train")
    assert not read
    files.check_picture.cache_clear()
    decoded = []
    load = Image.Image.load
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: decoded.append(image) or load(image))
    for place in range(4):
        asked(task, place)
    assert len(read) == 4 and len(decoded) == 2


OF_IMAGE = [  # what the column has, and the line that refuses it when the rows are read
    (
        "pictures/green.png",
        r"train\.jsonl, line 2: picture \S+/pictures/green\.png cannot be read \(No such file or directory\)",
    ),
    (
        "broken.png",
        r"line 2: picture \S+/broken\.png cannot be read \(cannot identify image file.*: give a PNG or JPEG file",
    ),
    ("https://example.com/a.png", r"line 2: picture https://example.com/a.png: nothing is read from a network"),
    (7, r"line 2: a picture cannot be read \(int is no picture: give bytes, a path, a data: URL or an image of PIL\)"),
    ("data:image/png;base64,abc", r"line 2: a picture cannot be read \(.*\): give a file, its bytes or a data: URL"),
    ("data:image/png;base64,AAAA", r"line 2: picture [0-9a-f]{16} cannot be read \(cannot identify image file"),
    ("iVBORw0KGgo" * 400, r"line 2: 'iVBORw0KGgo\S+\.\.\. is no path: write base64 as data:image/png;base64"),
    (
        "large.png",
        r"line 2: picture \S+/large\.png is larger than 120 pixels, the most that PIL reads: make it smaller",
    ),
]
ASSISTANT = [{"role": "user", "content": "A"}, {"role": "assistant", "content": [PLACE]}]
WITHOUT = "and {} <image> without one in the messages: write one for each picture, or none"
OF_PROMPT = [  # a prompt, its column, the line
    ("<image> or <image>?", URL, "line 2: 1 picture in the column image, " + WITHOUT.format(2)),
    ("<image>?", None, "line 2: 0 pictures in the column image, " + WITHOUT.format(1)),
    (user(PLACE), None, "line 2: 0 pictures in the column image, " + WITHOUT.format(1)),
    (user(PLACE | {"url": URL}), URL, "line 2: 1 picture in the column image, " + WITHOUT.format(0)),
    ([{"role": "system", "content": "A"}], URL, "line 2: the column image has 1 picture, and no message is the user's"),
    (ASSISTANT, URL, "line 2, column 'prompt': a message of the assistant has a picture: a policy writes text only"),
    (
        user({"type": "video"}),
        URL,
        "line 2, column 'prompt': a message has a part of type 'video': text and image are read",
    ),
    (
        user({"type": "input_audio"}),
        URL,
        "line 2, column 'prompt': a message has a part of type 'input_audio': text and image",
    ),
    ("<video>What?", URL, "line 2: a text has <video>: pictures and texts are read, other media are not"),
]
BROKEN = [({"prompt": "A", "image": value}, line) for value, line in OF_IMAGE]
BROKEN += [({"prompt": prompt, "image": value}, re.escape(line)) for prompt, value, line in OF_PROMPT]


@pytest.mark.parametrize(("row", "line"), BROKEN, ids=range(len(BROKEN)))
def test_a_row_whose_pictures_cannot_be_asked_is_refused_with_its_line(folder, monkeypatch, row, line):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "large.png").write_bytes(png("red", (11, 11)))
    good = {"prompt": user(of_text("A")) if isinstance(row["prompt"], list) else "good", "image": "pictures/red.png"}
    with pytest.raises(UserError, match=line) as refused:
        task_of(folder, good, row).examples("train")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_no_column_for_the_places_of_a_text(folder):
    with pytest.raises(
        UserError, match=r"0 pictures in no column \(task\.images names one\), and 1 <image> without one"
    ):
        task_of(folder, {"prompt": user(PLACE)}).examples("train")


def test_a_file_that_is_cut_short_fails_when_it_is_asked(folder):
    """Its head is sound, so only reading all of it tells."""
    (folder / "short.png").write_bytes(png("red", (64, 64))[:-30])
    task = task_of(folder, {"prompt": "A", "image": "short.png"})
    line = r"task\.prompt=prompt: picture \S+/short\.png cannot be read \(.*\): give a PNG or JPEG file"
    with pytest.raises(UserError, match=line):
        asked(task)


def test_reward_functions_get_the_prompt_with_marks_and_the_pictures_as_the_row_has_them(folder):
    row = {"prompt": user(of_text("A"), PLACE), "images": ["pictures/red.png"]}
    task = task_of(folder, row)
    columns = task.columns(task.examples("train")[0])
    assert columns["prompt"] == [{"role": "user", "content": "A<image>"}] and columns["images"] == ["pictures/red.png"]
    assert re.fullmatch("[0-9a-f]{16}", RED.name)
