"""The preflight of a policy that sees: each check finds the fault that is planted for it, and sound runs pass."""

from collections.abc import Iterator
from copy import deepcopy
from typing import ClassVar

import pytest
import torch
from conftest import compose_config
from helpers.looking import LOOKING, Looking
from helpers.seeing import made
from helpers.slots import Apart

from grpo.env.pictures import picture_of
from grpo.extras.images.eyes import Eyes
from grpo.extras.images.preflight import has_features, looks_at_pictures, tower_is_sent
from grpo.extras.preflight import callback as preflight
from grpo.extras.preflight.allowance import Allowance, shortened
from grpo.extras.preflight.data import held_out, questions
from grpo.extras.preflight.episodes import spelled_out
from grpo.extras.preflight.probe import Probe
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError
from train import train

KINDS = 19  # names without digits: 3 of the input, 8 of blocks, 4 of the merger, 4 of those for deeper layers


@pytest.fixture(scope="module")
def sound(tmp_path_factory, toy) -> Iterator[Probe]:
    """The probe of a sound run."""
    found: dict = {}
    folder = made("qwen3_vl", tmp_path_factory.mktemp("seeing"), toy)
    with pytest.MonkeyPatch.context() as patch:
        run = preflight.outcome

        def noted(check, probe):
            verdict = run(check, probe)
            found[check] = probe, verdict
            return verdict

        patch.setattr(preflight, "outcome", noted)
        patch.setattr(preflight, "CHECKS", {"texts": spelled_out, "held out": held_out})
        with pytest.raises(SystemExit):
            words = f"task=gsm8k model=path model.path={folder} model.vision=trained debug=smoke callbacks=none max_tokens=8"
            more = f"forecast=false preflight=only output_dir={tmp_path_factory.mktemp('run')}"
            config = compose_config(*words.split(), *more.split())
            config.task = LOOKING
            train(config)
    results = {check.__name__: verdict.result for check, (_, verdict) in found.items()}
    assert results == dict.fromkeys(
        ("spelled_out", "held_out", "has_features", "looks_at_pictures", "tower_is_sent"), "PASS"
    )
    assert found[tower_is_sent][1].compared.startswith(f"{KINDS} kinds of weights moved by ")
    yield found[tower_is_sent][0]


@pytest.fixture
def probe(sound) -> Probe:
    """A probe of that run that has played nothing yet."""
    parts = sound.module, sound.rollouts, sound.examples, sound.precision, sound.tokenizer
    return Probe(*parts, allowance=Allowance(2, fixed=1e9))


class Stale(Apart):
    """An engine with a copy of the weights, whose tower stays as it was."""

    def load_weights(self, model, version):
        copy = deepcopy(model)
        self.tower = copy.base_model.visual = getattr(self, "tower", copy.base_model.visual)
        super(Apart, self).load_weights(copy, version)


class Kept(Apart):
    """An engine with a copy of the weights, which keeps the features of pictures."""

    features: ClassVar[dict] = {}

    def load_weights(self, model, version):
        copy = deepcopy(model)
        eyes = copy.get_decoder().eyes
        compute = eyes.features

        def features(numbers, device):
            new = [n for n in dict.fromkeys(numbers) if n not in self.features]
            self.features |= compute(new, device) if new else {}
            return {n: self.features[n] for n in dict.fromkeys(numbers)}

        eyes.features = features
        super(Apart, self).load_weights(copy, version)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Apart, Stale, Kept])
def test_an_engine_whose_tower_stays_or_whose_features_are_kept(probe, monkeypatch, engine):
    monkeypatch.setattr(probe.rollouts, "engine", engine())
    monkeypatch.setattr(Kept, "features", {})
    result, text, *_ = tower_is_sent(probe)
    assert result == ("PASS" if engine is Apart else "FAIL"), text


@pytest.mark.slow
def test_a_policy_that_is_blind(probe, monkeypatch):
    """The tower's features do not depend on the picture."""
    compute = Eyes.features

    def alike(self, numbers, device):
        return {n: tuple(map(torch.zeros_like, layers)) for n, layers in compute(self, numbers, device).items()}

    monkeypatch.setattr(Eyes, "features", alike)
    result, text, remedy = looks_at_pictures(probe)
    assert (result, text[:43]) == ("FAIL", "other pictures move log-probabilities by 0.")
    assert remedy.startswith("the policy is blind: look at ")


@pytest.mark.slow
def test_prompts_without_pictures(probe, monkeypatch):
    monkeypatch.setattr(probe.rollouts, "task", Looking(count=0))
    for check in (has_features, looks_at_pictures, tower_is_sent):
        assert check(probe)[:2] == ("WARN", "no prompt of the first rows has a picture")


@pytest.mark.slow
def test_a_tower_with_fewer_features_than_a_prompt_has_places(probe, monkeypatch):
    probe.tokens  # noqa: B018 they are played before
    number = int(probe.tokens.ids.min())
    sight, name = probe.tokenizer.sight, picture_of(number).name
    ids = sight.ids(picture_of(number))
    monkeypatch.setitem(sight.known, picture_of(number), (*ids, number))
    places = ids.count(number)
    with pytest.raises(UserError, match=f"^pictures {name} have {places + 1} places in prompts, and {places} features"):
        has_features(probe)


def test_rows_with_a_picture_are_not_cut():
    """A part of a picture has no features. 12 tokens are cut to the last 4 of the prompt and 4 after it."""
    ids, real = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.int64)
    for picture, width in ((-5, 12), (5, 8)):
        ids[0, 2:4] = picture
        rows = TokenBatch(
            ids, real, real[:, 6:].bool(), torch.zeros(1, 6), torch.arange(1), ids[:, 6:], torch.zeros(1, 6)
        )
        assert shortened(rows, 8).ids.shape[1] == width


def test_one_question_about_other_pictures_is_another_question():
    rows = [{"problem": "Find x.", "images": [{"bytes": bytes([i]), "path": "a.png"}]} for i in (0, 1, 1)]
    one, two, again = questions(rows)
    assert one != two == again and one.startswith("find x ")
    assert [*questions([{"problem": "Find x."}, {"problem": "Find x.", "image": None}])] == ["find x"] * 2
