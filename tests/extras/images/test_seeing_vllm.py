"""Pictures for vLLM, without vLLM: what it is given, what it may not compute, and who takes none."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from helpers import seeing

from grpo.apps.engines import engine_of
from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.images import of_vllm
from grpo.extras.images.door import sight_of
from grpo.extras.images.of_vllm import Rendering, limit, with_pictures
from grpo.extras.serve.__main__ import main as serve
from grpo.extras.teachers.server import Served
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

A, B = seeing.drawn(60, 30, 0), seeing.drawn(40, 100, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy) -> str:
    return seeing.made("idefics3", tmp_path_factory.mktemp("sees"), toy)


@pytest.fixture
def sight(folder):
    return sight_of(Pretrained(folder, vision="frozen", eyes=sight_of))


def expanding(sight, heard: list, more: int = 0):
    """Return what stands for vLLM's rendering: it replaces the placeholder by the tokens of its picture, and `more` of them."""

    def render(prompt: dict) -> dict:
        heard.append(prompt)
        pictures = [
            A if picture == A.name else B for picture in prompt.get("multi_modal_uuids", {"image": []})["image"]
        ]
        ids = sight.expanded(prompt["prompt_token_ids"], pictures)
        return {"prompt_token_ids": [i if i >= 0 else sight.repeated for i in ids] + [sight.repeated] * more}

    return render


def test_vllm_gets_a_placeholder_and_a_file_for_each_picture(sight):
    heard = []
    render, place = Rendering(expanding(sight, heard), sight), sight.placeholder
    ids = [*sight.expanded([5, place, 6, place, place], [A, B, A])]
    made = render({"prompt_token_ids": ids, "cache_salt": "version 1"})
    assert [max(i, 0) for i in ids] == [i * (i != sight.repeated) for i in made["prompt_token_ids"]]
    (given,) = heard
    assert given["prompt_token_ids"] == [5, place, 6, place, place] and given["cache_salt"] == "version 1"
    assert given["multi_modal_uuids"] == {"image": [A.name, B.name, A.name]}
    images = given["multi_modal_data"]["image"]
    assert [image.size for image in images] == [(60, 30), (40, 100), (60, 30)] and {image.mode for image in images} == {
        "RGB"
    }
    render({"prompt_token_ids": [5, 6]})
    assert heard[1] == {"prompt_token_ids": [5, 6]}  # of a text nothing changes


def test_other_tokens_than_the_trainers_are_one_line(sight):
    ids = [*sight.expanded([5, sight.placeholder], [A])]
    with pytest.raises(
        UserError, match=rf"^vLLM reads {len(ids) + 2} tokens .* pictures {A.name}, the trainer {len(ids)}, or"
    ):
        Rendering(expanding(sight, [], more=2), sight)({"prompt_token_ids": ids})


def test_tokens_of_pictures_have_no_probability():
    logits = torch.tensor([[1.0, 50.0, 2.0, 9.0]])
    model = SimpleNamespace(compute_logits=lambda states: states)
    limit(model, [1, 3])
    assert torch.equal(model.compute_logits(logits), torch.tensor([[1.0, -1e4, 2.0, -1e4]]))
    assert model.compute_logits(None) is None  # on a rank that has no logits


class Stub:
    """An engine, as far as pictures change it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        core = SimpleNamespace(reset_encoder_cache=lambda: self.done.append("features forgotten"))
        self.head = SimpleNamespace(compute_logits=lambda states: states)
        self._llm = SimpleNamespace(
            llm_engine=core,
            sleep=lambda level: self.done.append(f"sleep {level}"),
            apply_model=lambda change: change(self.head),
            _preprocess_cmpl_one=dict,
        )
        self._path, self._new = "model", partial(dict, language_model_only=True, limit_mm_per_prompt={"image": 3})

    def _open(self) -> None:
        self.done.append("built")

    def _take(self, model: object) -> None:
        self.done.append("weights taken")


def test_vllm_is_built_to_see_and_no_picture_is_sampled(sight, monkeypatch):
    lent = {}
    monkeypatch.setattr(of_vllm, "lend", lent.__setitem__)
    engine = Stub()
    with_pictures(engine, sight)
    engine._open()
    given = engine._new()
    assert "language_model_only" not in given and given["limit_mm_per_prompt"] == {"video": 0, "image": 3}
    assert given["mm_device_do_normalize"] is False and lent == {given["served_model_name"]: sight}
    assert engine.done == ["built"] and engine._llm._preprocess_cmpl_one({"prompt_token_ids": [5]}) == {
        "prompt_token_ids": [5]
    }
    logits = engine.head.compute_logits(torch.zeros(1, len(sight.tokenizer)))[0]
    assert (logits < 0).nonzero()[:, 0].tolist() == sight.banned


def test_features_are_forgotten_when_what_made_them_has_learned(sight):
    engine = Stub()
    with_pictures(engine, sight)
    engine._take(SimpleNamespace(vision_learns=False))
    assert engine.done == ["weights taken"]
    engine._take(SimpleNamespace(vision_learns=True))
    assert engine.done[1:] == ["weights taken", "features forgotten"]
    engine._release()
    assert engine.done[3:] == ["sleep 1"]  # a frozen tower stays in the host's memory: no load brings it


class Mine:
    """An engine of a user's own."""

    def __init__(self, path: str, sight: object = None) -> None:
        self.sight = sight


class Blind:
    """The same, which takes no pictures."""

    def __init__(self, path: str) -> None:
        pass


def test_an_engine_gets_the_sight_or_is_refused_at_the_start(folder, sight):
    config = compose_config("model=path", f"model.path={folder}")

    def engine(target: str, vision: str | None) -> object:
        config.engine, config.model.vision = {"_target_": target, **own.get(target, {})}, vision
        return engine_of(config, lambda: None)

    here, built_in = __name__, "grpo.engines.builtin.engine.TransformersEngine"
    own = {f"{here}.{name}": {"path": folder} for name in ("Mine", "Blind")}
    assert engine(f"{here}.Mine", "frozen").sight is sight and engine(f"{here}.Mine", None).sight is None
    assert type(engine(f"{here}.Blind", None)) is Blind
    assert type(engine(built_in, "frozen")) is TransformersEngine
    appendices = "grpo.extras.shared_weights.shared.VLLMSharedEngine", "grpo.extras.vllm_server.engine.VLLMServerEngine"
    line = r"^model.vision=frozen: this engine takes no pictures: set engine=transformers or engine=vllm, or"
    for target in (f"{here}.Blind", *appendices):
        with pytest.raises(UserError, match=line):
            engine(target, "frozen")


def test_servers_take_none(folder):
    with pytest.raises(UserError, match=r"^teacher=server reads text only, .* take teacher=model"):
        Served(["http://127.0.0.1:9"], Pretrained(folder, vision="frozen", eyes=sight_of))
    with pytest.raises(UserError, match=r"^a server takes no pictures yet: set model.vision=null"):
        serve(["model=path", f"model.path={folder}", "model.vision=frozen", "engine=transformers", "port=0"])
