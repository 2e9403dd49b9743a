"""The policy as its own teacher: which context it reads, and what it then says about the same tokens."""

from dataclasses import replace

import pytest
import torch
from helpers.learning import fresh
from helpers.models import disturb
from helpers.privileged import batch_of, renderer_of, talk, taught
from helpers.runs import learned, rows, state
from helpers.taught import assigned
from peft import LoraConfig

from grpo.env.messages import Message
from grpo.env.types import State, Trajectory
from grpo.extras.teachers.privileged import Itself, written_after
from grpo.extras.teachers.teaching import Teaching, jsd
from grpo.models.policy import with_adapter
from grpo.system.errors import UserError

PROMPT = "{question} ({context}?)"


@pytest.fixture(scope="module")
def renderer(toy):
    return renderer_of(toy)


@pytest.fixture(scope="module")
def groups(renderer):
    """A group with two right answers of three, and one with none."""
    asked = {"question": "q", "answer": "3 + 4 = 7\n#### 7"}
    answers = [("7", 1.0), ("8 - 2", 0.0), ("3 + 4 = 7", 1.0)]
    first = [talk(renderer, ("3 + 4", text), value=value, example=asked) for text, value in answers]
    second = [talk(renderer, ("1 + 1 + 1", text), value=0.0, example=asked) for text in ("5", "12 + 7", "0")]
    return [first, second]


def lora(toy):
    policy = with_adapter(fresh(toy), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    disturb(policy, seed=2)
    return policy


def teaching(divergence="sampled", **change) -> dict:
    return {"teacher": Teaching(1.0, divergence, **change)}


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def read(module, groups) -> list[str | None]:
    """Return what the teacher reads before the first token of each row; None for rows that are out."""
    tokens = assigned(module, batch_of(groups))
    judged = (tokens.teaching > 0).any(1).tolist()
    tokenizer = module.parts["teacher"].rollouts.renderer.tokenizer
    prompts = [tokenizer.decode(prompt) for prompt, _ in module.parts["teacher"].reads.sequences()]
    assert [rest for _, rest in module.parts["teacher"].reads.sequences()] == [rest for _, rest in tokens.sequences()]
    return [prompt if judge else None for prompt, judge in zip(prompts, judged, strict=True)]


def shown(renderer, text: str) -> str:
    return renderer.tokenizer.decode(renderer.prompt_ids([Message("user", text)]))


@torch.no_grad()
def plainly(model, prompt, ids) -> torch.Tensor:
    """Return log-probabilities of the vocabulary before each of ids, [n, V], of the prompt and ids alone."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("divergence", "most"), [("sampled", 0.0), ("reverse", 1e-7), ("jsd", 1e-7)])
@pytest.mark.parametrize("adapted", [False, True])
def test_without_a_context_the_live_policy_has_nothing_to_teach(toy, renderer, groups, divergence, most, adapted):
    policy = lora(toy) if adapted else fresh(toy)
    before = weights(policy)
    metrics = taught(policy, Itself("live", context=None), renderer, **teaching(divergence)).training_step(
        batch_of(groups), 0
    )
    assert abs(metrics["teacher/divergence"]) <= most and metrics["loss/grad_norm"] <= 10 * most
    for name, p in weights(policy).items():
        torch.testing.assert_close(p, before[name], atol=most, rtol=0)


def test_the_first_right_sibling_is_read_and_never_the_sample_itself(toy, renderer, groups):
    module = taught(fresh(toy), Itself(context="sibling", prompt=PROMPT), renderer, **teaching())
    first, third = shown(renderer, "3 + 4 (7?)"), shown(renderer, "3 + 4 (3 + 4 = 7?)")
    assert read(module, groups) == [third, first, first, None, None, None]
    batch = batch_of(groups)
    module.training_step(batch, 0)
    assert batch.metrics["teacher/rows"] == 0.5
    nobody = taught(fresh(toy), Itself(context="sibling", success=1.5), renderer, **teaching())
    assert read(nobody, groups) == [None] * 6


def test_other_contexts(toy, renderer, groups):
    logged = talk(renderer, ("3 + 4", "8"), extra={"hint": "add {question}"})

    def prompts(group, **settings):
        return read(taught(fresh(toy), Itself(prompt=PROMPT, **settings), renderer, **teaching()), [group])

    told = [logged, replace(logged, reward=replace(logged.reward, extra=None))]
    assert prompts(told, context="feedback", column="hint") == [shown(renderer, "3 + 4 (add {question}?)"), None]
    assert prompts(groups[0][:1]) == [shown(renderer, "3 + 4 (7?)")]  # of GSM8K's answer
    assert prompts(groups[0][:1], column="question") == [shown(renderer, "3 + 4 (q?)")]
    talk_so_far = (
        Message("user", "1"),
        Message("assistant", "2"),
        Message("user", "3"),
    )  # the last question gets the context
    later = Trajectory((replace(logged.trajectory.steps[0], state=State(talk_so_far)),))
    expected = renderer.prompt_ids([*talk_so_far[:2], Message("user", "3 (4?)")])
    found = prompts([replace(logged, trajectory=later, example={"hint": "4"})], column="hint")
    assert found == [renderer.tokenizer.decode(expected)]
    with pytest.raises(UserError, match=r"no row has one; set teacher\.column to one of question, answer"):
        prompts(groups[0], column="hint")
    with pytest.raises(UserError, match=r"lacks \{question\}"):
        Itself(prompt="{context}")
    with pytest.raises(UserError, match="name a column that a reward function writes"):
        Itself(context="feedback")


def test_a_prompt_that_is_too_long_is_out(toy, renderer, groups):
    policy = fresh(toy)
    room = policy.config.max_position_embeddings
    lengthy = replace(groups[0][1], example={"hint": "7 " * room})
    module = taught(policy, Itself(column="hint"), renderer, **teaching())
    assert read(module, [[lengthy, replace(lengthy, example={"hint": "7"})]])[0] is None
    assert len(module.parts["teacher"].reads.ids[0]) < room


@pytest.mark.parametrize(
    ("start", "layout"),
    [("live", "padded"), ("live", "packed"), ("live", "shared_prompt"), ("start", "packed"), ("ema", "padded")],
)
def test_scores_are_those_of_the_longer_prompt_alone(toy, renderer, groups, layout, start):
    """Also for turns that go on, and for pages: a row keeps all that comes after its first prompt. The start has no adapter."""
    more = [("3 + 4", "8"), ("No: 3 + 4", "7")]
    turns = [talk(renderer, *more, value=1.0), talk(renderer, *more, value=1.0, pages=True)]
    policy = lora(toy)
    module = taught(policy, Itself(start, context="sibling"), renderer, layout=layout, **teaching())
    tokens = assigned(module, batch_of([groups[0], turns]))
    assert tokens.turn.amax(1).tolist() == [0, 0, 0, 1, 0, 1]  # two turns in one row, or in two
    scores, prompts = module.parts["teacher"].logprobs(tokens), module.parts["teacher"].reads.sequences()
    # the last page: no sibling has seen it
    assert (tokens.teaching > 0).any(1).tolist() == [True] * 5 + [False] and not scores[5].any()
    for r, (prompt, ids) in enumerate(prompts[:5]):
        with policy.disable_adapter() if start == "start" else torch.no_grad():
            exact = plainly(policy, prompt, ids).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        mask = tokens.mask[r, : len(ids)]
        torch.testing.assert_close(scores[r, : len(ids)][mask], exact[mask], atol=1e-5, rtol=0)


def test_what_a_sibling_wrote_after_a_state(renderer):
    pages = talk(renderer, ("1 + 1", "2"), ("2 + 2", "4"), pages=True).trajectory
    goes_on = talk(renderer, ("1 + 1", "3"), ("Sure?", "2")).trajectory
    first, second = (step.state for step in pages.steps)
    assert written_after(first, pages) == "2" and written_after(second, pages) == "4"
    assert written_after(first, goes_on) == "3\nSure?\n2" and written_after(second, goes_on) is None


@pytest.mark.parametrize("settings", [teaching(), teaching("jsd", top_k=20), teaching("reverse", reduce="sequence")])
def test_a_row_without_a_context_changes_nothing(toy, renderer, groups, settings):
    def step(some):
        policy = fresh(toy)
        metrics = taught(policy, Itself(context="sibling"), renderer, **settings).training_step(batch_of(some), 0)
        return weights(policy), metrics["teacher/divergence"], metrics["loss/grad_norm"]

    (alone, *numbers), (both, *others) = step(groups[:1]), step(groups)
    assert numbers == pytest.approx(others, rel=1e-5) and numbers[1] > 0.01
    for name in alone:
        torch.testing.assert_close(alone[name], both[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("divergence", ["sampled", "jsd"])
def test_updates_and_rollouts_without_a_context_change_nothing(toy, renderer, groups, divergence):
    """One of two minibatches has no row with a right sibling, and then a whole rollout."""
    policy = fresh(toy)
    module = taught(policy, Itself(context="sibling"), renderer, num_minibatches=2, **teaching(divergence))
    assert module.training_step(batch_of(groups), 0)["loss/grad_norm"] > 0.01
    before = weights(policy)
    assert module.training_step(batch_of([groups[1], groups[1]]), 0)["loss/grad_norm"] == 0
    assert all(torch.equal(p, before[name]) for name, p in weights(policy).items())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_the_mean_moves_after_each_update(toy, renderer, groups, adapted, alpha):
    """It begins as the policy: with alpha 1 it is the policy, else a weight goes a quarter of the way, each matrix by itself."""
    policy = lora(toy) if adapted else fresh(toy)
    mean, teacher = weights(policy), Itself("ema", alpha, "sibling")
    module = taught(policy, teacher, renderer, num_epochs=2, **teaching())
    moved, inner = [], teacher.moved
    teacher.moved = lambda: (moved.append(weights(policy)), inner())
    module.training_step(batch_of(groups), 0)
    got, norm = teacher.state_dict(), 0.0
    assert len(moved) == 2 and got.keys() == mean.keys()
    for name, start in mean.items():
        expected = start
        for after in moved:
            expected = after[name] if alpha == 1 else expected + alpha * (after[name] - expected)
        torch.testing.assert_close(got[name], expected, atol=1e-7, rtol=0)
        norm += float((moved[1][name] - start).norm())
    assert norm > 0.01
    with teacher.model() as model:
        assert all(torch.equal(p, got[name]) for name, p in weights(model).items())
    assert all(torch.equal(p, moved[1][name]) for name, p in weights(policy).items())
    assert len(teacher.own()) == len(mean)


def test_the_mean_compares_with_its_own_head_and_a_checkpoint_restores_it(toy, renderer, groups):
    """The divergence of a second update is that of the moved policy and the mean, each with its own head."""
    policy, teacher = fresh(toy), Itself("ema", 0.5, "sibling")
    module = taught(policy, teacher, renderer, lr=1.0, **teaching("jsd"))
    module.training_step(batch_of(groups[:1]), 0)
    saved = {name: p.clone() for name, p in teacher.state_dict().items()}
    (mean := fresh(toy)).load_state_dict(saved, strict=False)
    gap = policy.get_output_embeddings().weight - mean.get_output_embeddings().weight
    exact, sequences = (
        [],
        zip(batch_of(groups[:1]).tokens.sequences(), module.parts["teacher"].reads.sequences(), strict=True),
    )
    for (prompt, ids), (longer, _) in sequences:
        exact.append(jsd(plainly(policy, prompt, ids), plainly(mean, longer, ids)))
    metrics = module.training_step(batch_of(groups[:1]), 0)
    assert metrics["teacher/divergence"] == pytest.approx(torch.cat(exact).mean().item(), rel=1e-4)
    assert gap.abs().max() > 1e-3
    again = taught(policy, Itself("ema", 0.5), renderer, **teaching())
    again.parts["teacher"].teacher.load_state_dict(saved)
    for name, p in again.parts["teacher"].teacher.state_dict().items():
        assert torch.equal(p, saved[name])
    with pytest.raises(UserError, match="has no mean of this policy"):
        again.parts["teacher"].teacher.load_state_dict({})


def test_a_16_bit_mean_keeps_small_steps(toy, renderer):
    policy = fresh(toy).to(torch.bfloat16)
    teacher = Itself("ema", 0.001)
    teacher.attach(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.copy_(torch.ones_like(p))
    for _ in range(3):
        teacher.moved()
    name, start = "model.norm.weight", fresh(toy).model.norm.weight
    expected = 1 - (1 - start) * 0.999**3
    torch.testing.assert_close(teacher.state_dict()[name], expected.detach(), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adapter=none", "adapter=lora"])
def test_a_crashed_run_with_a_mean_resumes_bit_exactly(smoke, tmp_path, policy):
    """The mean lags behind the policy, so that a run that forgot it would learn something else."""

    def run(folder: str, *more: str) -> None:
        settings = f"""algo=sdpo teacher.success=0.3 teacher.alpha=0.2 algo.num_minibatches=2 rollout.num_rollouts=5 {policy}
            callbacks=[checkpoint] callbacks.checkpoint.every=2 rollout.group_size=4 output_dir={tmp_path / folder}"""
        (tmp_path / folder).mkdir(exist_ok=True)
        learned(smoke(*settings.split(), *more))

    run("straight")
    with pytest.raises(RuntimeError, match="the disk is full"):
        run("crashed", "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 3}")
    run("resumed", f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")
    straight, resumed = state(tmp_path / "straight"), state(tmp_path / "resumed")
    for part in ("state_dict", "teacher"):
        assert straight[part] and straight[part].keys() == resumed[part].keys()
        assert all(torch.equal(tensor, resumed[part][name]) for name, tensor in straight[part].items())
    mean = straight["teacher"]
    assert any(not torch.equal(mean[name], straight["state_dict"][f"policy.{name}"]) for name in mean)
    assert rows(tmp_path / "straight")[3:] == rows(tmp_path / "resumed")
    assert any(row["teacher/rows"] > 0 and row["loss/grad_norm"] > 0 for row in rows(tmp_path / "straight")[3:])
