"""vLLM and a trainer that see, in float32 on tiny random models: the same numbers for the same pictures."""

import itertools
from copy import deepcopy

import pytest
import torch
from helpers import seeing
from helpers.in_flight import at, segments
from helpers.models import disturb, gap

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine
from grpo.env.tokens import Completion
from grpo.extras.images.door import sight_of
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

A, B, OTHER = (
    seeing.drawn(60, 30, 0),
    seeing.drawn(40, 100, 1),
    seeing.drawn(60, 30, 2),
)  # the last as large as the first
BLACK = seeing.plain(60, 30, (0, 0, 0))
TEXTS = [
    ("hello", []),
    ("see PICTURE here", [A]),
    ("see PICTURE here", [OTHER]),
    ("PICTURE and PICTURE?", [A, B]),
    ("PICTURE", [BLACK]),
]
new_version = itertools.count(1)


class Both:
    """A model that sees, and an engine of it."""

    def __init__(self, kind: str, folder, toy, vision: str) -> None:
        path = seeing.made(kind, folder, toy, head_dim=32)
        # vLLM's imports need torchvision by name, which has no images
        pretrained = Pretrained(path, vision=vision, eyes=sight_of, pictures={"backend": "pil", **SMALL.get(kind, {})})
        self.model, self.tokenizer = pretrained.model(), pretrained.tokenizer()
        self.sight = self.tokenizer.sight
        args = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 256}
        self.engine = VLLMEngine(path, dtype="float32", args=args, sight=self.sight)
        shown = seeing.KINDS[kind][2]
        self.prompts = [self.prompt(text.replace("PICTURE", shown), pictures) for text, pictures in TEXTS]

    def prompt(self, text: str, pictures: list) -> list[int]:
        return [*self.sight.expanded(self.tokenizer(text, add_special_tokens=False).input_ids, pictures)]

    def sampled(self, **more) -> list[Completion]:
        """Give the engine the model's weights, and sample."""
        self.engine.load_weights(self.model, next(new_version))
        return self.engine.sample(self.prompts, Sampling(12, **more), [*range(len(self.prompts))])


# other settings than those of the folder's files
SMALL = {"qwen2_5_vl": {"max_pixels": 28 * 28 * 3, "image_mean": [0.1, 0.2, 0.3]}}


@pytest.fixture(scope="module")
def both(tmp_path_factory, toy):
    torch.set_num_threads(1)
    found = Both("qwen2_5_vl", tmp_path_factory.mktemp("seeing"), toy, "trained")
    yield found
    found.engine.close()


def test_the_log_probabilities_of_prompts_with_pictures_are_the_trainers(both):
    before = both.sampled()
    assert gap(both.model, both.prompts, before) < 1e-5
    again = both.sampled(temperature=0.7)
    assert gap(both.model, both.prompts, again, 0.7) < 1e-5
    assert [one.ids for one in both.sampled()] == [one.ids for one in before]  # of the same seeds
    # its tokens with the other picture, which is as large, have other log-probabilities
    assert gap(both.model, [both.prompts[2]], [before[1]]) > 1e-2


def test_a_tower_that_has_learned_is_seen_by_the_engine(both):
    """It has kept features of these pictures, and pixels."""
    tower = both.model.base_model.visual
    before, weights = both.sampled(), {name: p.clone() for name, p in tower.named_parameters()}
    disturb(tower, seed=5, size=0.1)
    after = both.sampled()
    stale = [Completion(one.ids, one.logprobs, one.finish) for one in before]
    assert gap(both.model, both.prompts[:1], stale[:1]) < 1e-5  # of a text alone
    assert all(gap(both.model, [prompt], [one]) > 1e-2 for prompt, one in zip(both.prompts[1:], stale[1:], strict=True))
    assert gap(both.model, both.prompts, after) < 1e-5
    tower.load_state_dict(weights, strict=False)


def test_a_completion_goes_on_with_the_tower_that_arrives_on_its_way(both, monkeypatch):
    old, new = next(new_version), next(new_version)
    models = {old: both.model, new: deepcopy(both.model)}
    disturb(models[new].base_model.visual, seed=7, size=0.1)
    both.engine.load_weights(both.model, old)
    at(both.engine, monkeypatch, {5: lambda: both.engine.load_weights(models[new], new)})
    found = both.engine.sample(both.prompts, Sampling(20, vllm={"ignore_eos": True}), [*range(len(both.prompts))])
    parts = [part for prompt, one in zip(both.prompts, found, strict=True) for part in segments(prompt, one)]
    assert [version for version, *_ in parts] == [old, new] * len(found)
    assert all(gap(models[version], [before], [tokens]) < 1e-5 for version, before, tokens in parts)


def test_the_tokens_of_pictures_are_not_sampled_however_likely_they_would_be(both):
    head = both.model.get_output_embeddings().weight
    before, banned = head.detach().clone(), both.sight.banned
    with torch.no_grad():
        head[banned] *= 100
    found = both.sampled()
    assert {i for one in found for i in one.ids}.isdisjoint(banned)
    assert gap(both.model, both.prompts, found) < 1e-5
    with torch.no_grad():
        head.copy_(before)


def test_tokens_that_differ_from_the_trainers_are_said_before_any_is_sampled(both, monkeypatch):
    monkeypatch.setitem(both.sight.known, A, (A.id, *both.sight.ids(A)))
    prompt = both.prompt(f"see {seeing.KINDS['qwen2_5_vl'][2]}", [A])
    with pytest.raises(
        UserError, match=rf"^vLLM reads {len(prompt) - 1} tokens .* {A.name}, the trainer {len(prompt)}, or"
    ):
        both.engine.sample([both.prompts[0], prompt], Sampling(4), [0, 1])
    monkeypatch.undo()
    assert gap(both.model, both.prompts, both.sampled()) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3_vl", "idefics3", "mistral3"])
def test_a_tower_that_stays_is_the_folders(kind, tmp_path, toy):
    both = Both(kind, tmp_path, toy, "frozen")
    disturb(both.model.get_decoder(), seed=6)
    assert gap(both.model, both.prompts, both.sampled()) < 1e-5
    both.engine.close()


def test_a_model_whose_pictures_see_themselves_is_refused(tmp_path, toy):
    with pytest.raises(UserError, match=r"^engine=vllm: tokens of a picture see each other in a gemma3"):
        Both("gemma3", tmp_path, toy, "frozen")
