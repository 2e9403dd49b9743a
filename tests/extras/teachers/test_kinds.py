"""Teachers of every kind score tokens as a plain forward pass of their model does, and refuse what they would score wrongly."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from conftest import EXAMPLES, TEST_PATH, compose_config
from helpers.learning import GROUPS, fresh, make_module, rollout
from helpers.models import disturb
from helpers.ranks import Ranks
from helpers.runs import rows, told
from helpers.serving import served
from helpers.taught import Alone

from grpo.config.early import check_early
from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.demo.demo_model import make_model, make_tokenizer
from grpo.extras.quantized.quantized import Quantized, quantize
from grpo.extras.teachers.kinds import Model, Passes, Start, Teacher
from grpo.extras.teachers.server import Served
from grpo.extras.teachers.several import Several
from grpo.extras.teachers.teaching import Teaching, coarse
from grpo.extras.vllm_server.launch import free_ports
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.rollout.collate import collate
from grpo.system.errors import UserError
from grpo.training.module import GRPOModule
from train import train

HEAT = 0.7


@pytest.fixture(scope="module")
def other(toy, tmp_path_factory) -> Path:
    """A folder of a model with the toy's tokens and other weights."""
    return saved(toy, tmp_path_factory.mktemp("other"), seed=1)


def saved(toy: Path, folder: Path, seed: int) -> Path:
    tokenizer = Pretrained(str(toy)).tokenizer()
    tokenizer.save_pretrained(folder)
    model = make_model(tokenizer, seed)
    disturb(model, seed, 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(other):
    with served(other, TransformersEngine) as client:
        client.ready()
        yield client


@torch.no_grad()
def truth(folder: Path | torch.nn.Module, batch: TokenBatch, heat: float = 1.0) -> list[torch.Tensor]:
    """Return log softmax of each row's tokens, [C, V], from a forward pass of the row alone."""
    model = fresh(folder) if isinstance(folder, Path) else folder
    rows = []
    for prompt, completion in batch.sequences():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        rows.append((logits / heat).log_softmax(-1))
    return rows


def of_tokens(rows: list[torch.Tensor], batch: TokenBatch) -> torch.Tensor:
    """Return the log-probabilities of the rows' own tokens, [B, C]."""
    found = torch.zeros_like(batch.rollout_logprobs)
    for r, (scores, (_, ids)) in enumerate(zip(rows, batch.sequences(), strict=True)):
        found[r, : len(ids)] = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return found


def tokens() -> TokenBatch:
    return replace(collate(GROUPS), row=torch.arange(len(collate(GROUPS))))


def attached(teacher: Teacher, toy: Path) -> Teacher:
    teacher.attach(fresh(toy))
    return teacher


def student(toy: Path) -> Pretrained:
    return Pretrained(str(toy))


def model(folder: Path, toy: Path | None = None, **settings) -> Model:
    return Model(Pretrained(str(folder)), toy and student(toy), **settings)


def taught(toy: Path, teacher: Teacher, teaching: Teaching, **settings) -> GRPOModule:
    return make_module(fresh(toy), parts={"teacher": Alone(teacher)}, teacher=teaching, policy_coef=0.0, **settings)


def gradient(module: GRPOModule, batch) -> torch.Tensor:
    """Return the step of an update with lr 0.1, which is -0.1 times the gradient."""
    before = torch.cat([p.detach().flatten() for p in module.policy.parameters()])
    module.training_step(batch, 0)
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()]) - before


# -- one model


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_a_model_scores_as_a_plain_forward_pass(toy, other, layout):
    batch, passes = tokens(), Passes(HEAT, layout, most=8)
    teacher = attached(model(other, toy, device="cpu", offload=True), toy)
    expected = truth(other, batch, HEAT)
    torch.testing.assert_close(teacher.logprobs(batch, passes), of_tokens(expected, batch), atol=1e-5, rtol=0)
    found = teacher.distributions(batch, passes).logprobs(slice(None), HEAT, 282)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_of_a_teachers_vocabulary_has_no_probability(toy, other, tmp_path):
    """Its head has 30 more rows, ten times as large as those of words: with them a word would have nearly no probability."""
    padded = fresh(other)
    words = padded.config.vocab_size
    padded.resize_token_embeddings(words + 30, mean_resizing=False)
    padded.get_output_embeddings().weight[words:] = 10 * padded.get_output_embeddings().weight[:30]
    padded.save_pretrained(tmp_path)
    Pretrained(str(other)).tokenizer().save_pretrained(tmp_path)
    batch, passes = tokens(), Passes(HEAT)
    found = attached(model(tmp_path, toy), toy).logprobs(batch, passes)
    torch.testing.assert_close(found, of_tokens(truth(other, batch, HEAT), batch), atol=1e-5, rtol=0)
    wrong = truth(padded, batch, HEAT)
    assert (of_tokens(wrong, batch) - found).abs().max() > 1


def test_the_start_stays_while_the_policy_moves(toy):
    batch = tokens()
    for lora in (False, True):
        policy = fresh(toy)
        if lora:
            policy = peft.get_peft_model(policy, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        teacher = Start()
        teacher.attach(policy)
        disturb(policy, seed=3, size=0.1)
        found = teacher.logprobs(batch, Passes(1.0))
        torch.testing.assert_close(found, of_tokens(truth(toy, batch), batch), atol=1e-5, rtol=0)
        assert (found - of_tokens(truth(policy, batch), batch)).abs().max() > 0.1
        assert bool(teacher.own()) != lora


def test_a_teacher_that_nothing_learns_from_is_refused():
    with pytest.raises(UserError, match=r"algo\.teacher\.coef=0, so the policy would not learn from the teacher"):
        Start().check(Teaching(0.0), 1.0)
    with pytest.raises(UserError, match=r"algo\.teacher\.coef=1.0, but this teacher scores no tokens"):
        Teacher().check(Teaching(1.0), 1.0)


def test_an_adapter_and_a_quantized_model_are_teachers(toy, tmp_path):
    base = fresh(toy)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    disturb(adapted, seed=3, size=0.1)
    adapted.save_pretrained(tmp_path)
    student(toy).tokenizer().save_pretrained(tmp_path)
    batch = tokens()
    found = attached(model(tmp_path, toy), toy).logprobs(batch, Passes(1.0))
    torch.testing.assert_close(found, of_tokens(truth(adapted, batch), batch), atol=1e-5, rtol=0)
    small = attached(Model(Pretrained(str(toy), quantization="8bit", quantizer=quantize)), toy)
    assert any(isinstance(layer, Quantized) for layer in small.loaded.modules())
    gap = (small.logprobs(batch, Passes(1.0)) - of_tokens(truth(toy, batch), batch)).abs()
    assert 0 < gap.max() < 0.1


@pytest.mark.parametrize("divergence", ["sampled", "reverse", "jsd"])
def test_the_gradient_is_that_of_the_equation(toy, other, divergence):
    batch, policy = tokens(), fresh(toy)
    theirs = torch.cat(truth(other, batch))
    ours = []
    for prompt, completion in batch.sequences():
        logits = policy(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        ours.append(logits.log_softmax(-1))
    ours, own = torch.cat(ours), torch.cat([torch.tensor(ids) for _, ids in batch.sequences()])
    if divergence == "sampled":
        gap = (theirs - ours).gather(1, own[:, None])[:, 0].detach()
        loss = -(gap * ours.gather(1, own[:, None])[:, 0]).mean()
    elif divergence == "reverse":
        loss = (ours.exp() * (ours - theirs)).sum() / len(theirs)
    else:
        mixture = ((ours.exp() + theirs.exp()) / 2).log()
        loss = sum((p.exp() * (p - mixture)).sum() for p in (ours, theirs)) / 2 / len(theirs)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    step = gradient(taught(toy, model(other, toy), Teaching(1.0, divergence)), rollout())
    torch.testing.assert_close(step, -0.1 * expected, atol=1e-6, rtol=1e-4)


# -- another tokenizer


def test_another_tokenizer_is_refused(toy, tmp_path):
    tokenizer = make_tokenizer(["Another text has other tokens: 12 + 7"] * 30)
    tokenizer.save_pretrained(tmp_path)
    make_model(tokenizer, 0).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"teacher.model.path=.* has another tokenizer than the policy: the policy's id of"
    ):
        attached(model(tmp_path, toy), toy)


def test_another_end_token_is_refused(toy, other, tmp_path):
    folder = shutil.copytree(other, tmp_path / "other")
    tokenizer = student(toy).tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="the policy would unlearn to end"):
        attached(model(folder, toy), toy)


def test_padded_rows_of_the_embedding_may_differ(toy, tmp_path):
    wide = fresh(toy)
    wide.resize_token_embeddings(wide.config.vocab_size + 64)
    wide.save_pretrained(tmp_path)
    student(toy).tokenizer().save_pretrained(tmp_path)
    step = gradient(taught(toy, model(tmp_path, toy), Teaching(1.0, "reverse")), rollout())
    assert step.abs().max() < 1e-3 and attached(model(tmp_path, toy), toy).loaded.config.vocab_size > 64


# -- a server


@pytest.mark.parametrize("heat", [1.0, HEAT])
def test_a_server_scores_as_the_model(toy, other, server, heat):
    batch, passes = tokens(), Passes(heat, top_k=3)
    teacher = Served([server.url], student(toy))
    teacher.check(Teaching(1.0, "reverse", top_k=3, top_of="teacher"), heat)
    expected = truth(other, batch, heat)
    attached(teacher, toy)
    torch.testing.assert_close(teacher.logprobs(batch, passes), of_tokens(expected, batch), atol=1e-5, rtol=0)
    found, expected = teacher.distributions(batch, passes).logprobs(slice(None), heat, 282), torch.cat(expected)
    kept = expected.topk(3).indices
    torch.testing.assert_close(coarse(found, kept, True), coarse(expected, kept, True), atol=1e-4, rtol=0)


def test_learning_from_a_server_is_learning_from_its_model(toy, other, server):
    for teaching in (Teaching(1.0), Teaching(1.0, "jsd", top_k=4, top_of="teacher")):
        steps = [
            gradient(taught(toy, teacher, teaching), rollout())
            for teacher in (model(other), Served([server.url], student(toy)))
        ]
        torch.testing.assert_close(*steps, atol=1e-6, rtol=1e-4)
        assert steps[0].abs().max() > 1e-5


def test_what_a_server_cannot_do_is_refused(toy, tmp_path, server):
    ours = student(toy)
    with pytest.raises(UserError, match=r"set algo.teacher.top_of=teacher algo.teacher.top_k=20"):
        Served([server.url], ours).check(Teaching(1.0, "reverse", top_k=5), 1.0)
    port = free_ports(1)[0]
    with pytest.raises(UserError, match=rf"no teacher answers within 0\.1 s \(http://127.0.0.1:{port}"):
        attached(Served([f"http://127.0.0.1:{port}"], ours, wait=0.1), toy)
    tokenizer = make_tokenizer(["Another text has other tokens: 12 + 7"] * 30)
    tokenizer.save_pretrained(tmp_path)
    make_model(tokenizer, 0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has another tokenizer than the policy: the id \d+ is"):
        attached(Served([server.url], student(tmp_path)), toy)


# -- several


def of_two(toy, other, **settings) -> Several:
    each = partial(Model, Pretrained(""), student(toy))
    return Several("kind", {"a": str(toy), "b": str(other)}, each, **settings)


def with_kinds(kinds: tuple[str, ...], order: tuple[int, ...] = (0, 1)):
    """Return a rollout whose groups have these kinds, in this order."""
    groups = [[replace(sample, example={"kind": kinds[i]}) for sample in GROUPS[i]] for i in order]
    return rollout(groups=groups)


@pytest.mark.parametrize("teaching", [Teaching(1.0), Teaching(1.0, "forward")], ids=["sampled", "forward"])
def test_each_row_has_its_own_teacher(toy, other, teaching):
    module = taught(toy, of_two(toy, other), teaching, max_tokens_per_microbatch=1000)
    batch = with_kinds(("a", "b"))
    metrics = module.training_step(batch, 0)
    assert metrics["teacher/a/divergence"] == pytest.approx(0, abs=1e-6)  # the policy's own start
    alone = taught(toy, model(other), teaching).training_step(rollout(groups=GROUPS[1:]), 0)
    assert metrics["teacher/b/divergence"] == pytest.approx(alone["teacher/divergence"], abs=1e-5)
    assert metrics["teacher/divergence"] == pytest.approx(metrics["teacher/b/divergence"] * 7 / 10, abs=1e-5)


@pytest.mark.parametrize("teaching", [Teaching(1.0), Teaching(1.0, "jsd")], ids=["sampled", "jsd"])
def test_the_order_and_the_microbatches_change_nothing(toy, other, teaching):
    steps = [
        gradient(taught(toy, of_two(toy, other), teaching, max_tokens_per_microbatch=most), with_kinds("ab", order))
        for order, most in (((0, 1), 1000), ((1, 0), 1000), ((1, 0), 6))
    ]
    for step in steps[1:]:
        torch.testing.assert_close(step, steps[0], atol=1e-6, rtol=1e-4)


def test_a_value_without_a_teacher(toy, other):
    with pytest.raises(
        UserError, match=r"a row has the value 'c', and teacher.teachers has a, b: add a teacher for it"
    ):
        taught(toy, of_two(toy, other), Teaching(1.0)).training_step(with_kinds(("a", "c")), 0)
    found = taught(toy, of_two(toy, other, default="b"), Teaching(1.0)).training_step(with_kinds(("a", "c")), 0)
    assert found["teacher/b/divergence"] != 0
    assert found["teacher/a/divergence"] == pytest.approx(0, abs=1e-6)  # the policy's own start
    with pytest.raises(UserError, match=r"teacher.default=d is not among teacher.teachers: a, b"):
        of_two(toy, other, default="d")


def test_a_row_that_is_too_long_for_the_teacher(toy, other):
    teacher = model(other)
    module = taught(toy, teacher, Teaching(1.0))
    teacher.limit = 4
    with pytest.raises(UserError, match="a row has 5 tokens, and the teacher reads 4"):
        module.training_step(rollout(), 0)


# -- as a user


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("algo.teacher.coef=0.1", "algo.teacher.coef=0.1, but teacher=none: take teacher=model"),
        ("algo.imitation.sampled=1", "algo.imitation.sampled=1, but teacher=none: take teacher=tokens"),
        ("algo.policy_coef=0", "algo.policy_coef=0, and no other part of the loss has a weight"),
        ("algo=opd", "teacher.model.path must have a value"),
        ("algo=opd teacher.model.path=./nowhere", "teacher.model.path=./nowhere is neither a local folder"),
        ("algo=mopd", "teacher.teachers must have a value"),
        ("teacher=server", "teacher.urls must have a value"),
    ],
)
def test_mistakes_that_are_named_without_torch(smoke, given, line):
    with pytest.raises(UserError, match=line):
        check_early(compose_config(*smoke(*given.split())))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("teacher=reference", "algo.teacher.coef=0, so the policy would not learn from the teacher"),
        ("teacher=tokens algo.teacher.coef=1", "algo.teacher.coef=1, but this teacher scores no tokens"),
    ],
)
def test_mistakes_that_are_named_before_a_model_is_loaded(smoke, given, line):
    assert line in told(*smoke(*given.split()))


@pytest.mark.slow
def test_a_run_with_a_teacher_for_each_source(toy, other, tmp_path):
    words = f"""algo=mopd task=mixture task.sources.gsm8k.task.path={EXAMPLES} model=path model.path={toy} debug=smoke
        rollout.prompts=4 callbacks=none forecast=false preflight=off max_tokens=8 output_dir={tmp_path}""".split()
    train(compose_config(*words, f"teacher.teachers={{gsm8k: {toy}, countdown: {other}}}"))
    found = {name: value for row in rows(tmp_path)[:2] for name, value in row.items()}  # later the policy has moved
    assert abs(found["teacher/gsm8k/divergence"]) < 1e-5 < abs(found["teacher/countdown/divergence"])


@pytest.mark.slow
@pytest.mark.parametrize("heat", [1.0, HEAT])
def test_a_run_with_a_served_teacher_equals_one_with_its_model(toy, other, smoke, tmp_path, heat):
    """`python -m grpo.serve` in a process of its own."""
    port = free_ports(1)[0]
    command = [
        sys.executable,
        "-m",
        "grpo.serve",
        "model=path",
        f"model.path={other}",
        "engine=transformers",
        f"port={port}",
    ]
    environment = os.environ | {"PYTHONPATH": TEST_PATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert "serving" in process.stdout.readline()
            found = []
            for name, kind in {
                "a": f"model teacher.model.path={other}",
                "b": f"server teacher.urls=[http://127.0.0.1:{port}]",
            }.items():
                more = f"algo=opd teacher={kind} rollout.sampling.temperature={heat} output_dir={tmp_path}/{name}"
                train(compose_config(*smoke(*more.split())))
                found.append(rows(tmp_path / name)[-1])
        finally:
            process.send_signal(signal.SIGINT)
    for name in ("teacher/divergence", "loss/grad_norm", "rollout/reward"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-5)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(toy, other, smoke, tmp_path):
    """Each device asks a whole teacher about its own rows, also if the policy is shared out (strategy=fsdp2)."""
    ranks, kind, single = Ranks(2), f"model teacher.model.path={other}", "algo.teacher.divergence=reverse"
    pairs = f"several teacher.column=question teacher.default=b teacher.teachers={{a:{toy},b:{other}}}"
    cases = [("ddp", f"{kind} adapter=lora {single}"), ("ddp", f"{pairs} {single}"), ("ddp", pairs)]
    moving = "reference algo.imitation.sampled=1 algo.num_minibatches=2"
    cases += [("fsdp2", given) for given in (kind, f"{kind} {single}", moving)]
    try:
        for i, (strategy, given) in enumerate(cases):
            more = f"algo=opd teacher={given} rollout.group_size=4 trainer=cpu trainer.timeout=60".split()
            found = []
            for devices in (1, 2):
                folder = tmp_path / f"{i}_{devices}"
                words = smoke(*more, f"output_dir={folder}", f"trainer.devices={devices}", f"strategy={strategy}")
                ranks.train(devices, words[:-1] if devices == 1 else words)
                found.append(rows(folder)[1:])
            for one, two in zip(*found, strict=True):
                for name in ("teacher/divergence", "loss/grad_norm"):
                    assert two.get(name) == pytest.approx(one.get(name), abs=1e-5), f"{strategy} {given} {name}"
    finally:
        ranks.close()
