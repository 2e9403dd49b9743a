"""Pictures that tools and environments return, in later turns of a real rollout, and in what a run keeps."""

import json
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from helpers.seeing import drawn, made
from PIL import Image

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message, ToolCall
from grpo.env.pictures import ALIVE, Picture
from grpo.env.types import Action, Reward, State
from grpo.extras.images.door import sight_of
from grpo.extras.tools.conversations import chat_message, messages_of
from grpo.extras.tools.env import ToolEnv, text_and_pictures
from grpo.models.pretrained import Pretrained
from grpo.rollout.episodes import play
from grpo.rollout.samples_table import records, replayable
from grpo.rollout.types import Limits
from grpo.system.errors import UserError
from grpo.training.plain import Tensors, from_plain, to_plain

FIRST, SECOND = drawn(40, 64, 1), drawn(90, 30, 2)


class Shown:
    """Asks about one picture, then shows another one in some form."""

    def __init__(self, second, role: str = "user") -> None:
        self.second, self.role = second, role

    def start(self) -> State:
        self.messages = [{"role": "user", "content": "<image>one", "pictures": [FIRST]}]
        return SimpleNamespace(messages=self.messages)

    def step(self, action: Action):
        if len(self.messages) > 1:
            return Reward(1.0, True)
        more = {"role": self.role, **self.second}
        self.messages = [*self.messages, action.message, more]
        return SimpleNamespace(messages=self.messages)


class Showing:
    """A task of such environments."""

    def __init__(self, *second) -> None:
        self.second = second

    def build(self, example) -> Shown:
        return Shown(self.second[example["place"]])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, toy) -> SimpleNamespace:
    """An engine and a renderer that see."""
    pretrained = Pretrained(made("idefics3", tmp_path_factory.mktemp("seeing"), toy), vision="frozen", eyes=sight_of)
    engine = TransformersEngine()
    engine.load_weights(pretrained.model(), 0)
    return SimpleNamespace(engine=engine, renderer=TemplateRenderer(pretrained.tokenizer()), pretrained=pretrained)


def played(seeing, task, size: int = 1, places: int = 1):
    sampling = Sampling(max_tokens=3, temperature=1.0)
    examples = [{"place": i, "image": {"bytes": FIRST.data, "path": None}} for i in range(places)]
    return play(
        task, examples, size, seeing.engine, seeing.renderer, sampling, lambda *place: hash(place), Limits(max_turns=2)
    )


FORMS = [
    {"content": "<image>two", "pictures": [SECOND]},
    {"content": [{"type": "image", "image": SECOND.data}, {"type": "text", "text": "two"}]},
    {"content": [{"type": "image"}, {"type": "text", "text": "two"}], "pictures": [Image.open(BytesIO(SECOND.data))]},
]


def test_a_picture_in_the_second_turn_is_a_part_of_the_row(seeing):
    """The second prompt begins with the very tokens of the first turn, then has the places of the other picture; messages may
    have any form. A picture of PIL is the same one if it is written as its file was."""
    groups = played(seeing, Showing(*FORMS), places=len(FORMS))
    sight = seeing.pretrained.tokenizer().sight
    for (sample,) in groups:
        first, second = sample.turns
        assert second.prompt_ids[: len(first.ids)] == first.ids
        new = second.prompt_ids[len(first.ids) :]
        assert first.prompt_ids.count(FIRST.id) == sight.ids(FIRST).count(FIRST.id) > 0
        shown = [number for number in dict.fromkeys(new) if number < 0]
        assert len(shown) == 1 and new.count(shown[0]) == sight.ids(SECOND).count(SECOND.id) > 0
    assert groups[0][0].turns[1].prompt_ids.count(SECOND.id) and groups[1][0].turns[1].prompt_ids.count(SECOND.id)


def test_a_broken_picture_of_an_environment_ends_its_episode_only(seeing):
    broken = {"content": "<image>two", "pictures": [b"no picture"]}
    (good,), (bad,) = played(seeing, Showing(FORMS[0], broken), places=2)
    assert len(good.turns) == 2 and not good.trajectory.failed and good.reward.value == 1
    assert bad.trajectory.end == "env_error" and "cannot be read" in bad.trajectory.error and not bad.reward.known


def test_messages_with_pictures_are_equal_by_their_bytes_and_records_hold_names(seeing):
    message = Message("user", "<image>", pictures=(FIRST,))
    assert message == Message("user", "<image>", pictures=(Picture(bytes(FIRST.data)),))
    assert len({message, Message("user", "<image>", pictures=(SECOND,)), replace(message)}) == 2
    assert "PNG" not in repr(message) and json.dumps(message.as_dict()).count(FIRST.name) == 1
    groups = played(seeing, Showing(FORMS[0]), size=2)
    for record in records(groups):
        whole = json.dumps(record)
        assert FIRST.name in record["messages"] and SECOND.name in record["messages"]
        assert FIRST.name in record["example"] and len(whole) < 2500 < len(FIRST.data)


def test_a_checkpoint_keeps_pictures_once_and_finds_them_again(seeing):
    """Tokens of a rollout that waits have ids only, so its messages bring the bytes. All samples, turns and rows share them."""
    groups = played(seeing, Showing(FORMS[0]), size=3)
    tensors = Tensors()
    plain = json.dumps(to_plain(groups, tensors, "rollout"))
    files = {name: tensor for name, tensor in tensors.items() if name.startswith("file.")}
    assert sorted(len(tensor) for tensor in files.values()) == sorted([len(FIRST.data), len(SECOND.data)])
    assert plain.count("$picture") > 6 and len(plain) < 60_000
    before = dict(ALIVE)
    try:
        ALIVE.clear()  # another process
        found = from_plain(json.loads(plain), {name: tensor.clone() for name, tensor in tensors.items()})
        assert found == [[sample for sample in group] for group in found]
        message = found[0][0].trajectory.steps[1].state.messages[-1]
        assert message.pictures[0].data == SECOND.data and message.pictures[0].id == SECOND.id and SECOND.id in ALIVE
        assert found[0][2].turns == groups[0][2].turns and found[0][0].example["image"]["bytes"] == FIRST.data
    finally:
        ALIVE.clear()
        ALIVE.update(before)


def test_recorded_rows_without_their_messages_are_refused(seeing):
    from grpo.extras.sources.conversion import Conversion
    from grpo.system.errors import RolloutError

    groups = played(seeing, Showing(FORMS[0]))
    [[rows]] = replayable(groups, 0)["rows"]
    record = {"group": 0, "rows": rows, "reward": 1.0}
    line = (
        r"here: a row has a picture, whose bytes are in no table of rows: play the prompts again, or take rows of text"
    )
    with pytest.raises(RolloutError, match=line):
        Conversion(seeing.pretrained, seeing.renderer).groups([("here", record)])


# -- tools


def page() -> list:
    """Show a page."""
    return [{"type": "text", "text": "the <image> tag"}, {"type": "image", "image": Image.open(BytesIO(SECOND.data))}]


def look() -> Picture:
    """Look."""
    return FIRST


def bad() -> dict:
    """Show what is no picture."""
    return {"type": "image", "image": b"no picture"}


def plain() -> list:
    """Say."""
    return ["<image>", 1, {"type": "text", "text": "a"}]


def test_a_tool_may_return_pictures():
    env = ToolEnv([Message("user", "?")], [page, look, bad, plain], max_chars=2000)
    calls = tuple(ToolCall(name, {}) for name in ("page", "look", "bad", "plain"))
    env.start()
    *_, paged, looked, failed, said = env.step(Action(Message("assistant", "", calls))).messages
    assert paged.content == "the [image] tag\n<image>" and len(paged.pictures) == 1
    assert Image.open(BytesIO(paged.pictures[0].data)).tobytes() == Image.open(BytesIO(SECOND.data)).tobytes()
    assert (looked.content, looked.pictures) == ("<image>", (FIRST,))
    assert failed.content.startswith("Error: UserError: picture ") and failed.error and not failed.pictures
    assert said.content == '["<image>", 1, {"type": "text", "text": "a"}]' and not said.pictures
    assert text_and_pictures([FIRST, "and", SECOND]) == ("<image>\nand\n<image>", (FIRST, SECOND))


def test_an_answer_that_is_cut_loses_the_pictures_after_the_cut():
    env = ToolEnv([Message("user", "?")], [look], max_chars=5)
    assert env.answer(ToolCall("look", {})) == Message("tool", "<imag... (cut: 7 characters)", name="look")


def test_a_policy_that_reads_text_reads_a_word_in_place_of_a_tools_picture(toy, seeing):
    """A user's picture is refused in one line."""
    tokenizer = Pretrained(str(toy)).tokenizer()
    blind = TemplateRenderer(tokenizer)
    asked, answered = Message("user", "?"), Message("tool", "a <image>", name="look", pictures=(FIRST,))
    words = blind.prompt_ids([asked, Message("tool", "a [image]", name="look")])
    assert blind.prompt_ids([asked, answered]) == words and min(words) >= 0
    assert seeing.renderer.prompt_ids([asked, answered]).count(FIRST.id) > 0
    with pytest.raises(UserError, match=r"a message has a picture, and the model reads text only: set model\.vision"):
        blind.prompt_ids([Message("user", "<image>", pictures=(FIRST,)), answered])


def test_a_tools_text_may_have_the_token_of_a_picture(seeing):
    """A page that a tool has read may: it is a word, and later prompts begin with the same tokens."""
    render, looked = seeing.renderer.prompt_ids, Message("tool", "<image>", name="look", pictures=(FIRST,))
    talks = [[Message("user", "?"), Message("tool", f"a {word} b"), looked] for word in ("<image>", "[image]")]
    ids, words = map(render, talks)
    assert ids == words and FIRST.id in ids
    assert render([*talks[0], Message("assistant", "ok"), Message("user", "so?")], before=ids)[: len(ids)] == ids


def test_a_tools_picture_is_seen_without_a_template_too(seeing, monkeypatch):
    talk = [Message("user", "?"), Message("tool", "<image>", name="look", pictures=(FIRST,))]
    monkeypatch.setattr(seeing.renderer.tokenizer, "chat_template", None)
    assert FIRST.id in seeing.renderer.prompt_ids(talk)


def test_a_token_of_a_picture_in_a_text_is_one_line(seeing):
    """A user's text may not have the token that stands for a picture, here <image>; neither may a picture's place be missing."""
    with pytest.raises(UserError, match=r"a prompt has 0 pictures, and its text 1 places for them \(<image>\)"):
        seeing.renderer.prompt_ids([Message("user", "the <image> tag")])
    with pytest.raises(ValueError, match="a message has 1 pictures and 2 <image> in its text: write one for each"):
        Message("user", "<image><image>", pictures=(FIRST,))
    assert torch.is_tensor(seeing.pretrained.tokenizer().sight.pixels(FIRST.id)["pixel_values"])


def test_a_client_of_a_server_cannot_name_a_file(tmp_path):
    """Messages of requests pass `chat_message`, which takes pictures that were read before, and no path."""
    (tmp_path / "a.png").write_bytes(FIRST.data)
    asked = {"role": "user", "content": "<image>", "pictures": [str(tmp_path / "a.png")]}
    assert messages_of([chat_message(asked)]) == (Message("user", "<image>"),)
    assert messages_of([chat_message(asked | {"pictures": [FIRST]})]) == (
        Message("user", "<image>", pictures=(FIRST,)),
    )
