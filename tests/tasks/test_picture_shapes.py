"""Pictures of shapes: a row is a function of its index and the seed, and a tiny model learns to see them."""

from io import BytesIO

import numpy as np
import pytest
from helpers.programs import command
from PIL import Image

from grpo.runs.run import Run
from grpo.system.errors import UserError
from tasks.digits import Digits
from tasks.shapes import COLORS, PLACES, SIDE, Shapes, said, words


def pixels_of(message) -> np.ndarray:
    (picture,) = message.pictures
    return np.asarray(Image.open(BytesIO(picture.data))).astype(float)  # [56, 56, 3]


def test_a_picture_has_the_color_and_the_place_of_its_row():
    task, again = Shapes(noise=0.0, ask="both"), Shapes(noise=0.0, ask="both")
    for i in range(40):
        row = task.examples("train")[i]
        assert row == again.examples("train")[i] and row["answer"] == row[row["type"]]
        (message,) = task.messages(row)
        assert message.content == "<image>" + row["question"] and message == again.messages(row)[0]
        pixels = pixels_of(message)
        shape = (pixels == COLORS[row["color"]]).all(2)
        assert (pixels[~shape] == 40).all()
        y, x = np.argwhere(shape).mean(0)
        assert PLACES[2 * (y > SIDE / 2) + (x > SIDE / 2)] == row["place"]
    assert [*Shapes(seed=1).examples("train")][:5] != [*task.examples("train")][:5]
    assert {row["type"] for row in Shapes().examples("test")} == {"color"}


def test_noise_is_as_large_as_asked_and_a_blind_policy_gets_the_same_grey():
    row = Shapes().examples("test")[0]
    clean, noisy = (pixels_of(Shapes(noise=noise).messages(row)[0]) for noise in (0.0, 10.0))
    assert (noisy - clean)[clean == 40].std() == pytest.approx(10, rel=0.05)
    blind = [Shapes(blind=True).messages(Shapes().examples("test")[i])[0] for i in (0, 1)]
    assert (pixels_of(blind[0]) == 40).all() and blind[0].pictures == blind[1].pictures


def test_the_answer_alone_is_right():
    assert said(["red", " red", "red or blue", "blue", ""], ["red"] * 5) == [1, 1, 0, 0, 0]


def test_a_word_is_paid_where_it_stands():
    answers = ["top left", "top right", "bottom right", "left top", "top", "top left left", ""]
    assert words(answers, ["top left"] * 7) == [1, 0.5, 0, 0, 0, 0, 0]
    assert words(["red", "blue"], ["red"] * 2) == [1, 0]


def test_digits_say_what_to_install():
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"pip install -e '\.\[digits\]'"):
            Digits().examples("train")
    else:
        task = Digits()
        assert [len(task.examples(split)) for split in ("train", "validation", "test")] == [1078, 359, 360]
        assert pixels_of(task.messages(task.examples("train")[0])[0]).shape == (SIDE, SIDE)


@pytest.mark.slow
def test_a_tiny_model_learns_to_see(tmp_path):
    """A blind one guesses one of four colors."""
    words = "experiment=shapes rollout.num_rollouts=40 eval.every=40"
    run = command("train.py", *words.split(), f"output_dir={tmp_path}")
    assert run.returncode == 0, run.stderr
    accuracy = Run(tmp_path).metrics["eval/accuracy"].dropna()
    assert accuracy.iloc[0] < 0.45 and accuracy.iloc[-1] > 0.8
