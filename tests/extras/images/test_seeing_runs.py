"""Runs whose policy sees: what learns with an adapter, what is saved and exported, references and teachers, and how often a
picture is looked at."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from helpers.looking import LOOKING
from helpers.models import disturb
from helpers.seeing import drawn, made
from peft import LoraConfig

from grpo.extras.critic.module import ValueLearning
from grpo.extras.devices.sharding import Sharded
from grpo.extras.export.export import main as export
from grpo.extras.images import eyes
from grpo.extras.images.door import sight_of
from grpo.extras.images.sight import Sight
from grpo.extras.teachers.kinds import Model, Passes
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.teaching import Teaching
from grpo.models.logprobs import completion_logprobs
from grpo.models.policy import Reference, with_adapter
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError
from train import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy) -> str:
    return made("qwen2_5_vl", tmp_path_factory.mktemp("seeing"), toy)


def seeing(folder: str, vision: str = "trained", **more) -> Pretrained:
    return Pretrained(folder, vision=vision, eyes=sight_of, **more)


def row_of(pretrained: Pretrained) -> TokenBatch:
    """Return a row: a prompt with a picture, and three tokens after it."""
    sight = sight_of(pretrained)
    row_of.held = picture = drawn(56, 28, 7)
    ids = torch.tensor([[*sight.expanded([5, 6, sight.placeholder, 7], [picture]), 20, 21, 22]])
    real = torch.ones_like(ids)
    return TokenBatch(ids, real, real[:, -3:].bool(), torch.zeros(1, 3), torch.arange(1))


@torch.no_grad()
def logprobs(model, row: TokenBatch) -> torch.Tensor:
    return completion_logprobs(model, row, 1.0, layout="shared_prompt")[0]


def of_tower(policy) -> set[str]:
    """Return the names of the weights that learn outside the decoder."""
    return {name for name, p in policy.named_parameters() if p.requires_grad and ".visual." in name}


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_an_adapter_of_the_text_part_or_of_both(folder, vision):
    """3 layers of 7 matrices in the decoder; in the tower 3 blocks of 5 and 2 of the merger. Each has two factors."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    policy = with_adapter(seeing(folder, vision).model(), lora)
    learns = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(of_tower(policy)) == (2 * 17 if vision == "trained" else 0)
    assert len(learns - of_tower(policy)) == 2 * 21
    row = row_of(seeing(folder))
    values, _ = completion_logprobs(policy, row, 1.0, layout="shared_prompt")
    disturb(policy, seed=2)  # the factors B begin as 0, and those A have no gradient then
    values, _ = completion_logprobs(policy, row, 1.0, layout="shared_prompt")
    values.sum().backward()
    moved = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == learns


def test_a_reference_has_a_tower_of_its_own(folder):
    policy, row = seeing(folder).model(), row_of(seeing(folder))
    reference, before = Reference(policy), logprobs(policy, row)
    disturb(policy.base_model.visual, seed=3, size=0.1)
    with reference.model() as model:
        assert torch.equal(logprobs(model, row), before)
    assert not torch.allclose(logprobs(policy, row), before, atol=1e-3)


@pytest.mark.slow
def test_a_teacher_sees_with_the_policys_settings(folder, tmp_path):
    """The same model gives the same numbers, also with more rows in its head; its banned tokens stay banned."""
    student = seeing(folder, pictures={"max_pixels": 1568})
    policy, row = student.model(), row_of(student)
    larger = Pretrained(folder).model()
    with torch.no_grad():
        larger.resize_token_embeddings(policy.config.get_text_config().vocab_size + 64, mean_resizing=False)
    larger.save_pretrained(tmp_path)
    sight_of(student).tokenizer.save_pretrained(tmp_path)
    sight_of(student).save(tmp_path)
    for path in (folder, str(tmp_path)):
        teacher = Model(Pretrained(path), student)
        teacher.attach(policy)
        gaps = teacher.logprobs(row, Passes(1.0)) - logprobs(policy, row)
        assert float(gaps.abs().max()) < 1e-5
    assert teacher.pretrained.pictures == {"max_pixels": 1568}


def test_teachers_and_critics_that_do_not_see(folder, toy, tmp_path):
    student = seeing(folder)
    policy = student.model()
    other = made("idefics3", tmp_path, toy)
    counts = (
        r"another processor of pictures than the policy: a picture of 64 x 40 pixels has \d+ tokens there, and 2 here"
    )
    for path, why in ((str(toy), "pictures are for idefics3, .* is a llama"), (other, counts)):
        with pytest.raises(UserError, match=why):
            Model(Pretrained(path), student).attach(policy)
    with pytest.raises(UserError, match=r"^teacher=server reads text only, .*: take teacher=model$"):
        Served(["http://127.0.0.1:9"], student).check(Teaching(coef=1.0), 1.0)
    with pytest.raises(UserError, match=r"^critic=model reads text only, .*: take critic=head$"):
        ValueLearning(Pretrained(folder)).critic(policy)
    assert ValueLearning().critic(policy).model is None


def test_rows_with_a_part_of_a_picture(folder):
    """The check of places in rows: 2 of them, of which one is cut off."""
    student = seeing(folder)
    row, model = row_of(student), student.model()
    place = int((row.ids[0] < 0).nonzero()[0])
    ids = torch.cat([row.ids[:, :place], row.ids[:, place + 1 :]], dim=1)
    with pytest.raises(UserError, match="has 1 places in rows, and 2 features"):
        model.get_decoder()(input_ids=ids)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory) -> SimpleNamespace:
    """A run with an adapter on both parts, a reference and groups of eight; the processor's calls, and what was sent."""
    out, calls, copied = tmp_path_factory.mktemp("run"), Counter(), []
    with pytest.MonkeyPatch.context() as patch:
        seen, send = Sight.seen, eyes.sent
        patch.setattr(Sight, "seen", lambda self, picture: calls.update([picture.id]) or seen(self, picture))
        patch.setattr(eyes, "sent", lambda x, device: copied.append(x) or send(x, device))
        words = f"""task=gsm8k model=path model.path={folder} model.vision=trained adapter=lora algo/kl=loss algo.num_epochs=2
            debug=smoke callbacks=[samples,checkpoint] rollout.group_size=8 max_tokens=6 forecast=false preflight=off
            adamw.lr=1e-2 model.pictures.max_pixels=1568 output_dir={out}"""
        config = compose_config(*words.replace("model.pictures.", "+model.pictures.").split())
        config.task = LOOKING
        _, policy = train(config)
    return SimpleNamespace(out=out, calls=calls, copied=copied, policy=policy)


@pytest.mark.slow
def test_a_picture_is_looked_at_once(run):
    """A group of eight, the old log-probabilities, the reference and two epochs share what the processor has made of it."""
    asked = (
        2 * 2 + 4
    )  # rollouts of two prompts, and four that are held out; further ones are looked at for their length
    assert len(run.calls) >= asked and set(run.calls.values()) == {1}
    assert any(x.dtype == torch.float32 and x.shape[1:] == (3 * 2 * 14 * 14,) for x in run.copied)  # pixels, in patches


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_an_export_sees_like_the_run(run, tmp_path, merge):
    last = run.out / "checkpoints" / "last"
    export([str(last), str(tmp_path / "out"), *["--merge"] * merge])
    again = seeing(str(tmp_path / "out"))
    sight, row = sight_of(again), row_of(again)
    assert sight.images.size["longest_edge"] == 1568
    assert (tmp_path / "out" / "processor_config.json").is_file()
    assert torch.allclose(logprobs(again.model(), row), logprobs(run.policy, row), atol=1e-5)


@pytest.mark.slow
def test_an_evaluation_of_the_run(run, tmp_path):
    from eval import evaluate

    config = compose_config(f"run={run.out}", "eval.limit=4", f"output_dir={tmp_path}", name="eval")
    config.task = LOOKING
    assert evaluate(config) == pytest.approx(
        json.loads((tmp_path / "metrics.json").read_text())["eval/accuracy"]["value"]
    )
    held_out = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert len(held_out) == 4 and held_out < {file.name for file in (run.out / "pictures").iterdir()}


def test_a_policy_that_sees_is_not_shared_out(folder):
    with pytest.raises(UserError, match=r"^strategy=fsdp2 shares out no policy that sees: set strategy=ddp"):
        Sharded.share(None, SimpleNamespace(policy=seeing(folder).model()))
