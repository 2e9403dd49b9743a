"""Small copies of the pictures in tables of samples: what a run keeps of them, and where its page shows them."""

import json
import logging
import os
import re
import shutil
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import EXAMPLES
from helpers.seeing import drawn, plain
from PIL import Image

from grpo.apps.cli import completed
from grpo.env.messages import Message
from grpo.env.pictures import Picture
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.images import thumbnails
from grpo.extras.images.door import OpenSight
from grpo.extras.images.thumbnails import KeepsPictures, keep, small
from grpo.extras.report import write_report
from grpo.extras.report.inspect_log import message_of_inspect
from grpo.extras.report.pictures import names_in_prompt
from grpo.extras.terminal.callback import sample_panel
from grpo.rollout.samples_table import conversation_of, records
from grpo.rollout.types import Sample
from grpo.training.callbacks.samples import Samples

SIGHT = object.__new__(OpenSight)  # its processor is not needed
CHROMIUM = shutil.which("chromium")
RED, GREEN, WIDE = plain(20, 30, (230, 40, 40)), plain(8, 8, (40, 200, 60)), plain(512, 128, (60, 80, 240))
TALL = plain(8, 16, (240, 220, 40))


def episode(*messages: Message, number: int = 0) -> Sample:
    """Return an episode: a step for each answer, which are all of the policy's messages but one of the prompt, `as before`."""
    policy = [i for i, one in enumerate(messages) if one.role == "assistant" and one.content != "as before"]
    steps = tuple(Step(State(messages[:i]), Action(messages[i])) for i in policy)
    turn = Turn((1,), Completion((2,), (0.0,), "stop"))
    return Sample({"row": number}, Trajectory(steps), (turn,) * len(steps), Reward(1.0, True))


def asked(text: str, *pictures: Picture, role: str = "user") -> Message:
    return Message(role, text, pictures=pictures)


ANSWER = Message("assistant", "red")
ONE = episode(asked("<image> Which? <image>", RED, WIDE), ANSWER)
LATER = episode(
    asked("<image>Which?", GREEN), Message("assistant", "as before"), asked("<image> Where?", RED), Message("assistant", "look"),
    asked("a <image> b", TALL, role="tool"), ANSWER, number=1,
)  # fmt: skip


def pixels(data: bytes) -> np.ndarray:
    with Image.open(BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"), dtype=float)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose rollout 2 has both episodes, and whose evaluations have the first."""
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLES / "run", folder)
    (samples,) = completed({"samples": Samples(str(folder))}, SimpleNamespace(sight=SIGHT))
    samples.write("rollouts", 2, [[ONE], [LATER]], {})
    for rollout in (0, 2):
        right = Sample(ONE.example, ONE.trajectory, ONE.turns, Reward(float(rollout), rollout > 0))
        samples.write("evaluations", rollout, [[right]], {})
    return folder


def data_of(folder: Path) -> dict:
    """Return the data of the page of a run."""
    text = write_report(folder).read_text()
    assert re.search(r"default-src 'none'; img-src data:;", text)
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_a_page_holds_the_pixels_of_the_pictures_that_its_samples_name(run):
    data = data_of(run)
    assert {*data["pictures"]} == {one.name for one in (RED, GREEN, WIDE, TALL)}
    sizes = {RED.name: (20, 30), GREEN.name: (8, 8), TALL.name: (8, 16)} | {WIDE.name: (128, 32)}  # a quarter
    for picture in (RED, GREEN, WIDE, TALL):
        kind, _, text = data["pictures"][picture.name].partition(",")
        shown = pixels(b64decode(text))
        assert kind == "data:image/jpeg;base64" and shown.shape == (*sizes[picture.name][::-1], 3)
        assert np.abs(shown - pixels(picture.data)[0, 0]).max() <= 2  # what JPEG makes of one colour
    step = next(step for step in data["steps"] if (step["kind"], step["rollout"]) == ("rollout", 2))
    assert [sample["pictures"] for sample in step["samples"]] == [[RED.name, WIDE.name], [RED.name]]
    later = data["conversations"][step["samples"][1]["conversation"]]
    assert later[-1]["content"][1] == {"type": "image", "image": TALL.name}
    (problem,) = data["changed"]["problems"]
    assert problem["pictures"] == [RED.name, WIDE.name]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_shows_pictures_in_their_places(run):
    """A picture that is not kept is a name. The list leaves out the words that all prompts begin with, not their pictures."""
    sync_api = pytest.importorskip("playwright.sync_api")
    for gone in (WIDE, TALL):
        (run / "pictures" / f"{gone.name}.jpg").unlink()
    place, red, green, wide = write_report(run).as_uri(), *(f"picture {one.name}" for one in (RED, GREEN, WIDE))
    parts = "nodes => nodes.map((node) => [...node.childNodes].map((n) => n.alt ?? n.textContent).filter(Boolean))"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page, complaints = browser.new_page(), []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(place)
        page.locator("#step").select_option(label="rollout 2 (2)")
        page.locator(".list tbody tr").nth(1).click()
        shown = page.locator("#detail .message .text").evaluate_all(parts)
        assert shown[::2] == [[green, "Which?"], [red, " Where?"], ["a ", f"[picture {TALL.name}]", " b"]]
        assert shown[1::2] == [["as before"], ["look"], ["red"]]
        listed = page.locator(".list tbody tr span:first-child").evaluate_all(parts)
        assert listed == [[red, "Which? ", f"[{wide}]"], [red, "Where?"]]
        assert page.locator("#changed .text").evaluate_all(parts)[0] == [red, " Which? ", f"[{wide}]"]
        sizes = page.evaluate("[...document.images].map((image) => `${image.naturalWidth} x ${image.naturalHeight}`)")
        assert {*sizes} == {"20 x 30", "8 x 8"}
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert complaints == []
        browser.close()


def test_a_run_without_pictures_keeps_none(tmp_path):
    (samples,) = completed({"samples": Samples(str(tmp_path))}, SimpleNamespace())
    assert type(samples) is Samples
    words = episode(asked("write <image>"), ANSWER)
    keep(tmp_path, [[words]])
    (row,) = records([[words]])
    assert names_in_prompt(row) == [] and not [*tmp_path.iterdir()]


def test_a_copy_is_the_picture_as_the_model_sees_it_and_small():
    """The colours of 4 x 4 pixels are those of a mean of them; noise of 56 x 56 pixels is stored as it is, up to what JPEG leaves
    out."""
    left, right = (pixels(plain(4, 4, colour).data) for colour in ((255, 0, 0), (0, 0, 255)))
    file = BytesIO()
    halves = np.concatenate([np.tile(left, (64, 64, 1)), np.tile(right, (64, 64, 1))], axis=1).astype(np.uint8)
    Image.fromarray(halves).save(file, "PNG")  # 512 x 256
    shown = pixels(small(Picture(file.getvalue())))
    assert shown.shape == (64, 128, 3)
    assert np.abs(shown[:, :56] - [255, 0, 0]).max() <= 2 and np.abs(shown[:, 72:] - [0, 0, 255]).max() <= 2
    noise = drawn(56, 56, 0)
    assert len(small(noise)) < 8000 and np.abs(pixels(small(noise)) - pixels(noise.data)).mean() < 12


def test_a_resumed_run_adds_what_is_missing_and_makes_nothing_twice(tmp_path, monkeypatch):
    keep(tmp_path, [[ONE]])
    before = {file.name: file.read_bytes() for file in (tmp_path / "pictures").iterdir()}
    made = []
    monkeypatch.setattr(thumbnails, "small", lambda picture: made.append(picture) or small(picture))
    keep(tmp_path, [[ONE], [LATER, LATER]])
    after = {file.name: file.read_bytes() for file in (tmp_path / "pictures").iterdir()}
    assert made == [GREEN, TALL] and before.items() < after.items()
    assert after.keys() - before.keys() == {f"{one.name}.jpg" for one in made}


def test_above_the_bound_the_pictures_that_were_seen_last_stay(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(thumbnails, "MOST", 2)
    caplog.set_level(logging.INFO)
    for age, picture in enumerate((RED, GREEN)):
        keep(tmp_path, [[episode(asked("<image>", picture), ANSWER)]])
        os.utime(tmp_path / "pictures" / f"{picture.name}.jpg", (age, age))
    keep(tmp_path, [[episode(asked("<image>", RED), ANSWER)]])  # again, as an evaluation does
    assert not caplog.records
    for picture in (WIDE, GREEN):
        keep(tmp_path, [[episode(asked("<image><image>", RED, picture), ANSWER)]])
        assert {file.stem for file in (tmp_path / "pictures").iterdir()} == {RED.name, picture.name}
        os.utime(tmp_path / "pictures" / f"{picture.name}.jpg", (1, 1))
    (line,) = caplog.messages
    assert "holds the last 2 pictures of samples" in line


def test_only_tables_of_samples_are_taught_and_once(tmp_path):
    samples, other = Samples(str(tmp_path)), SimpleNamespace()
    assert SIGHT.taught(other) is other and SIGHT.taught(SIGHT.taught(samples)) is samples
    assert type(samples).__mro__.count(KeepsPictures) == 1 and type(samples).__name__ == "Samples"


def test_texts_name_pictures_in_their_places():
    """In the terminal, in logs of Inspect and in traces of trackio."""
    text = f"[picture {RED.name}] Which? [picture {WIDE.name}]"
    assert str(sample_panel("rollout 1", ONE).renderable) == f"{text}\nred"
    assert f"\na [picture {TALL.name}] b\n" in str(sample_panel("rollout 1", LATER).renderable)
    (row,) = records([[ONE]])
    first, last = conversation_of(row)
    assert message_of_inspect(first) == {"role": "user", "content": text} and last["content"] == "red"
    words = Message("user", "an <image> in a text").as_dict()
    assert conversation_of(row | {"messages": json.dumps([words])})[0] == words
