"""Pictures in messages, and prompts that have them."""

import base64
import copy
import gc
import pickle
from io import BytesIO

import pytest
from helpers.seeing import drawn, made
from PIL import Image

from grpo.env import pictures
from grpo.env.messages import Message, message_of
from grpo.env.pictures import Picture, picture_from, picture_of
from grpo.extras.images.door import sight_of
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

TALL, WIDE = drawn(40, 64, 1), drawn(90, 30, 2)


def address(picture: Picture) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.data).decode()}"


def test_the_same_bytes_are_one_picture_as_long_as_anybody_has_it():
    data = bytes(100)
    one = Picture(data)
    assert one.id < 0 and Picture(bytes(100)) is one and picture_of(one.id) is one
    assert pickle.loads(pickle.dumps(one)) is one and copy.deepcopy([one])[0] is one
    other = Picture(data[:-1] + b"1")  # which begins alike
    assert other.id != one.id and other != one
    number = one.id
    del one
    gc.collect()
    assert number not in pictures.ALIVE
    with pytest.raises(UserError, match="that no message holds"):
        picture_of(number)


def test_a_picture_comes_in_many_forms(tmp_path):
    file = tmp_path / "tall.png"
    file.write_bytes(TALL.data)
    both = {"bytes": TALL.data, "path": "nowhere.png"}
    for form in (
        TALL,
        TALL.data,
        str(file),
        file,
        {"bytes": None, "path": str(file)},
        both,
        address(TALL),
        {"url": address(TALL)},
    ):
        assert picture_from(form) is TALL
    image = Image.open(BytesIO(TALL.data))
    assert Image.open(BytesIO(picture_from(image).data)).tobytes() == image.tobytes()
    with pytest.raises(UserError, match=r"picture nowhere\.png cannot be read: No such file"):
        picture_from("nowhere.png")
    with pytest.raises(UserError, match="nothing is read from a network"):
        picture_from("https://example.org/a.png")
    with pytest.raises(TypeError, match="int is no picture"):
        picture_from(3)


def test_parts_of_a_message_become_a_text_with_marks_and_back():
    parts = [
        {"type": "text", "text": "Left: "},
        {"type": "image", "image": TALL.data},
        {"type": "text", "text": ", right: "},
    ]
    parts.append({"type": "image_url", "image_url": {"url": address(WIDE)}})
    message = message_of({"role": "user", "content": parts})
    assert message == Message("user", "Left: <image>, right: <image>", pictures=(TALL, WIDE))
    assert message.as_dict()["content"] == [
        {"type": "text", "text": "Left: "},
        {"type": "image", "image": TALL.name},
        {"type": "text", "text": ", right: "},
        {"type": "image", "image": WIDE.name},
    ]
    assert message_of(message) == message and hash(message) != hash(message_of({"role": "user", "content": parts[:3]}))
    given = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "?"}],
        "pictures": [WIDE],
    }  # TRL's form
    assert message_of(given) == Message("user", "<image>?", pictures=(WIDE,))
    forms = [
        {"type": "input_image", "image_url": address(WIDE)},
        {"type": "image", "bytes": TALL.data, "path": "no.png"},
    ]
    assert message_of({"role": "user", "content": forms}).pictures == (WIDE, TALL)  # as rows of datasets have them


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"role": "user", "content": "no mark", "pictures": [TALL]}, "1 pictures and 0 <image> in its text"),
        ({"role": "user", "content": [{"type": "image"}]}, "has no picture, and there are 0 beside the message"),
        ({"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, "is no part of a message"),
        ({"role": "assistant", "content": "<image>", "pictures": [TALL]}, "it writes text only"),
    ],
)
def test_a_message_that_cannot_be_is_one_line(message, line):
    with pytest.raises((TypeError, ValueError), match=line):
        message_of(message)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "idefics3", "gemma3"])
def renderer(request, tmp_path_factory, toy) -> TokenizerRenderer:
    folder = made(request.param, tmp_path_factory.mktemp(request.param), toy)
    return TokenizerRenderer(Pretrained(folder, vision="frozen", eyes=sight_of).tokenizer())


def test_a_conversation_goes_on_with_the_very_ids_of_its_pictures_and_answers(renderer):
    sight = renderer.tokenizer.sight
    asked = message_of({"role": "user", "content": "Look: <image> What?", "pictures": [TALL]})
    prompt = renderer.prompt_ids([asked])
    assert prompt.count(TALL.id) == sight.ids(TALL).count(TALL.id) > 0
    done = in_pieces(renderer)
    answer = renderer.parse(done, before=prompt)
    more = message_of({"role": "user", "content": "And <image>?", "pictures": [WIDE]})
    longer = renderer.prompt_ids([asked, answer, more], before=prompt + done)
    assert longer[: len(prompt) + 2] == prompt + done and longer.count(WIDE.id) == sight.ids(WIDE).count(WIDE.id)
    other = message_of({"role": "user", "content": "Look: <image> What?", "pictures": [WIDE]})
    assert (
        renderer.prompt_ids([other]) != prompt
        and sight.folded(renderer.prompt_ids([other]))[0] == sight.folded(prompt)[0]
    )


def in_pieces(renderer: TokenizerRenderer) -> tuple[int, int]:
    """Return the ids of two characters that the tokenizer reads as one token."""
    tokenizer = renderer.tokenizer
    for i in range(len(tokenizer)):
        text = tokenizer.decode([i])
        pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in text]
        if text.isalpha() and len(pieces) == 2 and tokenizer.encode(text, add_special_tokens=False) == [i]:
            return pieces[0][0], pieces[1][0]
    raise AssertionError("no token of two letters")


def test_the_processor_sees_a_picture_once(renderer, monkeypatch):
    sight, picture, calls = renderer.tokenizer.sight, drawn(64, 64, 9), []
    monkeypatch.setattr(sight, "seen", lambda one, seen=sight.seen: calls.append(one) or seen(one))
    for _ in range(8):  # a group
        renderer.prompt_ids([Message("user", "<image>?", pictures=(picture,))])
        sight.pixels(picture.id)
    assert calls == [picture]


def test_the_tokens_of_a_picture_are_known_as_long_as_anybody_has_it(renderer, monkeypatch):
    """While its pixels are kept, they need no second look; what is read of many pictures is not kept for ever."""
    sight = renderer.tokenizer.sight
    monkeypatch.setattr(sight, "seen", lambda one, seen=sight.seen: looks.append(one.name) or seen(one))
    looks, before, data = [], len(sight.known), [drawn(32, 32, seed).data for seed in range(20, 24)]
    first = sight.ids(Picture(data[0]))
    for one in data:
        sight.ids(Picture(one))
    gc.collect()
    assert len(looks) == 4 and len(sight.known) == before and sight.ids(Picture(data[0])) == first
    sight.bytes -= sum(x.nbytes for x in sight.kept.pop(Picture(data[0]).id).pixels.values())
    assert sight.ids(Picture(data[0])) == first and len(looks) == 5


def test_prompts_that_cannot_be_are_one_line(renderer, toy):
    sight = renderer.tokenizer.sight
    with pytest.raises(UserError, match="a prompt has 0 pictures, and its text 1 places for them"):
        renderer.prompt_ids([Message("user", f"Read {sight.text}")])
    with pytest.raises(UserError, match=r"picture \w{16} cannot be read .*give a PNG or JPEG file"):
        renderer.prompt_ids([Message("user", "<image>?", pictures=(Picture(b"no file"),))])
    blind = TokenizerRenderer(Pretrained(str(toy)).tokenizer())
    with pytest.raises(UserError, match=r"the model reads text only: set model.vision=frozen"):
        blind.prompt_ids([Message("user", "<image>?", pictures=(TALL,))])
    with pytest.raises(UserError, match=r"pictures are for .*and .* is a llama; set model.vision=null"):
        Pretrained(str(toy), vision="frozen", eyes=sight_of).tokenizer()
