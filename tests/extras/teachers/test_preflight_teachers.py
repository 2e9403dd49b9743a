"""Checks of a teacher: each finds, by name, the fault that is planted for it; a sound run passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import compose_config
from helpers.foreign_server import SCORES, Scorer, answer
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.extras.demo.demo_model import SHIPPED
from grpo.extras.preflight import callback as preflight
from grpo.extras.preflight import data, learning
from grpo.extras.preflight.checked import Checked
from grpo.extras.preflight.probe import Probe
from grpo.extras.teachers.checks import CHECKS as TAUGHT
from grpo.extras.teachers.demonstrations import Demonstrations
from grpo.extras.teachers.divergence import Distributions
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Imitation, Teaching
from grpo.models.pretrained import Pretrained
from grpo.runs.run import Run
from train import train


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Iterator[tuple[Probe, dict]]:
    """The probe and the manifest of a run whose teacher is the policy with other weights."""
    folder, found = tmp_path_factory.mktemp("run"), []
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "wordmath")
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.1 * p.data.std() * torch.randn_like(p)
    model.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(SHIPPED / "wordmath").save_pretrained(folder / "teacher")
    settings = "callbacks=none forecast=false task.train_size=50 task.test_size=20 logger=csv preflight=only"
    settings += " rollout.prompts=4 rollout.group_size=4 rollout.sampling.temperature=0.8 algo=opd"
    with pytest.MonkeyPatch.context() as patch:
        run = preflight.outcome
        patch.setattr(preflight, "outcome", lambda check, probe: found.append(probe) or run(check, probe))
        with pytest.raises(SystemExit):
            paths = f"teacher.model.path={folder / 'teacher'}", f"output_dir={folder / 'out'}"
            train(compose_config(*settings.split(), *paths))
    yield found[0], Run(folder / "out").manifest


@pytest.fixture
def probe(checked) -> Probe:
    """That probe, which keeps its episodes."""
    return checked[0]


def found(name: str, probe: Probe) -> Checked:
    return preflight.outcome(TAUGHT[name], probe)


@pytest.fixture
def whole(probe, monkeypatch) -> Probe:
    """The probe with a divergence of whole distributions."""
    teaching = Teaching(coef=1.0, divergence="jsd")
    monkeypatch.setattr(probe.module, "algorithm", replace(probe.module.algorithm, teacher=teaching))
    return probe


def test_a_sound_teacher_passes_and_is_in_the_plan(checked):
    verdicts, plan = checked[1]["preflight"], checked[1]["plan"]
    skipped = {name for name, verdict in verdicts.items() if verdict["result"] == "SKIP"}
    assert {verdict["result"] for verdict in verdicts.values()} == {"PASS", "SKIP"}
    assert {"there is something to learn", "tokens have the weights of the loss"} < skipped
    assert skipped & TAUGHT.keys() == {"the texts to learn from are there"}
    assert verdicts["the gradient ignores microbatches"]["result"] == "PASS"
    assert plan["teacher"].startswith("teacher: /") and plan["teacher"].endswith("teacher, divergence sampled, coef 1")


def test_whole_distributions_pass_too(whole):
    assert {found(name, whole).result for name in [*TAUGHT][:3]} == {"PASS"}
    assert preflight.outcome(learning.gradient, whole).result == "PASS"


def test_a_teacher_without_training(probe, monkeypatch):
    """The median says so: single tokens may be unlikely for a sound teacher, too."""
    torch.manual_seed(0)
    teacher = probe.module.parts["teacher"].teacher
    monkeypatch.setattr(teacher, "loaded", teacher.pretrained.outline())
    verdict = found("the teacher knows these texts", probe)
    assert (
        verdict.result == "FAIL"
        and "uniform guessing -6.0" in verdict.compared
        and "without training" in verdict.remedy
    )
    assert found("the teacher's numbers are its own", probe).result == "PASS"


def test_another_temperature(probe, monkeypatch):
    before = probe.module.parts["teacher"].logprobs

    def sharper(tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe.module, "temperature", 1.0)
            return before(tokens)

    monkeypatch.setattr(probe.module.parts["teacher"], "logprobs", sharper)
    verdict = found("the teacher's numbers are its own", probe)
    assert verdict.result == "FAIL" and verdict.remedy == "they are those of temperature 1"


def test_another_temperature_of_whole_distributions(whole, monkeypatch):
    logprobs, teacher = Distributions.logprobs, whole.module.parts["teacher"].teacher.loaded

    def halved(self, at, temperature, *more):
        return logprobs(self, at, temperature * (2 if self.model is teacher else 1), *more)

    monkeypatch.setattr(Distributions, "logprobs", halved)
    verdict = found("the teacher's numbers are its own", whole)
    assert verdict.result == "FAIL" and verdict.remedy == "they are those of temperature 1.6"


@pytest.mark.parametrize(("by", "where"), [(1, "before"), (-1, "after")])
def test_a_mask_that_is_off_by_one(probe, monkeypatch, by, where):
    before = probe.module.parts["teacher"].logprobs
    monkeypatch.setattr(probe.module.parts["teacher"], "logprobs", lambda tokens: before(tokens).roll(by, 1))
    verdict = found("the teacher's numbers are its own", probe)
    assert verdict.result == "FAIL" and verdict.remedy == f"they are those of the token {where}"


def test_a_teacher_that_reads_other_tokens(probe, monkeypatch):
    late = lambda tokens, *_: (replace(tokens, ids=tokens.ids.roll(1, 1)), None)  # noqa: E731
    monkeypatch.setattr(probe.module.parts["teacher"].teacher, "reading", late)
    verdict = found("the teacher's numbers are its own", probe)
    assert verdict.result == "FAIL" and verdict.remedy.startswith("look at what it reads")


def test_another_tokenizer(probe, toy, monkeypatch):
    monkeypatch.setattr(probe.module.parts["teacher"].teacher, "pretrained", Pretrained(str(toy)))
    verdict = found("the teacher reads the same tokens", probe)
    assert verdict.result == "FAIL" and "another tokenizer" in verdict.remedy


def test_a_teacher_elsewhere(probe, monkeypatch):
    """A server's model cannot be compared, but whether it knows these texts is measured."""

    @contextmanager
    def elsewhere():
        raise NotImplementedError
        yield

    known = probe.module.parts["teacher"].logprobs(probe.assigned(probe.compared))
    monkeypatch.setattr(probe.module.parts["teacher"].teacher, "model", elsewhere)
    assert found("the teacher's numbers are its own", probe).result == "SKIP"
    for values, result in ((known, "PASS"), (known - 3, "WARN"), (known - 9, "FAIL")):
        monkeypatch.setattr(probe.module.parts["teacher"], "logprobs", lambda tokens, values=values: values)
        assert found("the teacher knows these texts", probe).result == result


def test_a_row_that_is_too_long_for_the_teacher(probe, monkeypatch):
    name, most = "the teacher reads the longest row", probe.rollouts.plan.sampling.max_tokens
    monkeypatch.setattr(probe.module.parts["teacher"].teacher, "limit", most)  # and no prompt
    verdict = found(name, probe)
    assert verdict.result == "FAIL" and f"and the teacher reads {most}" in verdict.compared
    with Scorer() as server:
        served = Served([server.url], Pretrained(str(SHIPPED / "wordmath")))
        served.check(Teaching(1.0, "reverse", top_k=4, top_of="teacher"), 1.0)
        served.attach(probe.module.policy)
        monkeypatch.setattr(probe.module.parts["teacher"], "teacher", served)
        seen = []
        server.routes[SCORES] = lambda body: seen.append(body) or server.score(body)
        assert found(name, probe).result == "PASS"
        prompts = [len(prompt) for prompt, _ in probe.tokens.sequences()]
        assert [(len(body["prompt"]), body["prompt_logprobs"]) for body in seen] == [(max(prompts) + most, 4)]
        server.routes[SCORES] = lambda body: (200, answer(body["prompt"], 1))
        verdict = found(name, probe)
        assert verdict.result == "FAIL" and server.url in verdict.remedy and "of the 4 likeliest" in verdict.remedy


def test_texts_that_are_not_there_and_wrong_ones(probe, monkeypatch):
    def of(**weights: float) -> Checked:
        monkeypatch.setattr(probe.module, "algorithm", replace(probe.module.algorithm, imitation=Imitation(**weights)))
        return found("the texts to learn from are there", probe)

    silent, none, wrong = of(observed=0.05), of(given=1.0), of(sampled=1.0)
    assert silent.result == "FAIL" and "observed weighs nothing: the environment says nothing after" in silent.remedy
    assert none.result == "FAIL" and "given weighs nothing" in none.remedy
    assert wrong.result == "WARN" and wrong.compared.endswith("to imitate are right")


def test_a_policy_without_signal_may_learn_from_its_teacher(probe, monkeypatch):
    monkeypatch.setattr(probe.module, "algorithm", replace(probe.module.algorithm, policy_coef=1.0))
    monkeypatch.setitem(vars(probe), "scores", replace(probe.scores, rewards=torch.zeros_like(probe.scores.rewards)))
    verdict = data.signal(probe)
    assert verdict.result == "WARN" and "from its teacher or texts alone" in verdict.compared


def test_demonstrations_are_graded_in_place_of_samples(probe, monkeypatch):
    """The policy answers one in eight of these problems, and the demonstrations are right."""
    monkeypatch.setattr(probe.module, "algorithm", replace(probe.module.algorithm, imitation=Imitation(sampled=1.0)))
    monkeypatch.setattr(probe.rollouts, "selection", Demonstrations())
    verdict = found("the texts to learn from are there", probe)
    assert verdict.result == "PASS" and verdict.compared.endswith(
        f"100% of {len(probe.rows)} answers to imitate are right"
    )
