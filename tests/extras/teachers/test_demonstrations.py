"""Demonstrations: in place of samples they are supervised fine-tuning, beside samples a part of the loss of their own."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REAL_DATA, ROOT, seed
from helpers.demonstrated import TASK, batch, demonstrated, moved, sampled, taught
from helpers.episodes import said
from helpers.learning import fresh
from helpers.programs import command
from helpers.runs import rows, state, told
from transformers import AutoTokenizer

from grpo.apps.rows import check_teaching
from grpo.config.composing import composed
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.scoring import score_group
from grpo.env.tokens import Completion
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.teachers.demonstrations import Beside, Demonstrations, Right, demonstration_of
from grpo.extras.teachers.kinds import Teacher
from grpo.extras.teachers.teaching import Imitation
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.rollout.collate import collate
from grpo.rollout.types import Limits, Sample
from grpo.system.errors import UserError
from grpo.training.callbacks.evaluation import EvaluationCallback
from tasks.calculator import Calculator
from tasks.gsm8k import GSM8K
from tasks.mixture import Mixture

SMOLLM = Path.home() / ".cache" / "grpo" / "smollm2-135m-instruct"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "3*4=12\n\\boxed{12}"
SIGNAL = torch.tensor([[1.0, -1.0], [0.5, -0.5], [1.0, -1.0]])


def tokenizer(template: str | None):
    made = AutoTokenizer.from_pretrained(ROOT / "grpo/extras/demo/demo_models/wordmath")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


# -- a demonstration as tokens


@pytest.mark.parametrize("folder", [ROOT / "grpo/extras/demo/demo_models/wordmath", SMOLLM])
def test_a_demonstration_has_the_tokens_of_the_chat_template(folder):
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    real = AutoTokenizer.from_pretrained(folder)
    renderer, question = TokenizerRenderer(real), Message("user", "How many are 3 * 4?")
    both = [question.as_dict(), {"role": "assistant", "content": ANSWER}]
    whole = tuple(real.apply_chat_template(both, tokenize=True, return_dict=False))
    ours = (*renderer.prompt_ids((question,)), *renderer.answer_ids(Message("assistant", ANSWER)))
    assert ours == whole[: len(ours)] and ours[-1] == real.eos_token_id
    assert real.decode(whole[len(ours) :]).strip() == ""  # a line break that the policy would not sample


def test_the_end_of_a_message_is_the_templates_or_that_of_a_sequence():
    def said(template: str | None, text: str = ANSWER) -> str:
        made = tokenizer(template)
        return made.decode(TokenizerRenderer(made).answer_ids(Message("assistant", text)))

    assert said(CHATML) == ANSWER + "<|im_end|>"
    assert said(None) == ANSWER + "<|end|>"
    thinks = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert said(thinks, f"<think>\nI see.\n</think>\n{ANSWER}") == f"I see.\n</think>\n{ANSWER}<|im_end|>"
    assert said(thinks, f"I see.\n</think>\n{ANSWER}") == f"I see.\n</think>\n{ANSWER}<|im_end|>"


def test_a_conversation_gives_its_last_messages():
    class Talks:
        def demonstration(self, example):
            return example["talk"]

    def of(*roles: str) -> list[str]:
        talk = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
        return [message.content for message in demonstration_of(Talks(), {"talk": talk})]

    assert of("system", "user", "assistant") == ["2"]
    assert of("user", "assistant", "user", "assistant", "tool", "assistant") == ["3", "4", "5"]
    assert of("user", "assistant", "user") == []
    assert demonstration_of(Talks(), {"talk": " "}) == demonstration_of(object(), {}) == []


def test_demonstrations_of_tasks_are_right():
    tasks = [TASK]
    if REAL_DATA.is_dir():
        path, rows = str(REAL_DATA / "gsm8k_train_1000.jsonl"), {"held_out": {"test": 0.1}, "train_limit": 100}
        tasks += [GSM8K(path, prompt=form, config=None, **rows) for form in ("chat", "one_shot")]
        assert demonstration_of(tasks[2], tasks[2].examples("train")[0])[0].content[0] == " "  # after "Answer:"
    mixed = Mixture({f"{i}": {"task": task} for i, task in enumerate(tasks)})
    for task in (*tasks, mixed):
        for example in (task.examples("train")[i] for i in range(8)):
            [answer] = demonstration_of(task, example)
            trajectory = Trajectory((Step(State((Message("user", "?"),)), Action(answer)),))
            [reward] = score_group(task, example, [trajectory], [])
            assert reward.correct and "<<" not in answer.content


# -- in place of samples


def test_they_are_played_and_graded_as_any_answer(parts):
    groups = demonstrated(parts)
    for example, [sample] in zip(TASK.examples("train")[:3], groups, strict=True):
        [turn] = sample.turns
        assert sample.reward.correct and not sample.trajectory.truncated
        assert sample.trajectory.answer == example["solution"]
        assert turn.completion.ids == parts[1].answer_ids(Message("assistant", example["solution"]))
        assert turn.completion.temperature == 1 and not any(turn.completion.logprobs)


def test_long_ones_are_left_out_and_counted_once(parts, caplog):
    three = [TASK.examples("train")[i] for i in range(3)]
    lengths = [len(parts[1].answer_ids(demonstration_of(TASK, example)[0])) for example in three]
    most, selection = max(lengths) - 1, Demonstrations()
    for _ in range(2):
        groups = selection.play(TASK, three, 1, *parts, Sampling(most), seed, Limits())
        assert [len(group) for group in groups] == [int(length <= most) for length in lengths]
    count = sum(length > most for length in lengths)
    said = [record.getMessage() for record in caplog.records if "no demonstration" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{count} of 3 examples of a rollout")
    with pytest.raises(UserError, match="3 of 3 examples"):
        demonstrated(parts, most=2)


@pytest.mark.parametrize(("share", "sampled"), [(0.0, []), (0.5, [1, 3, 5, 7]), (0.3, [3, 6]), (1.0, [*range(8)])])
def test_lambda_is_the_share_of_rollouts_that_are_sampled(share, sampled):
    """The others are demonstrations: one for each prompt, without the engine."""
    seen = {}

    def select(draw):
        seen[draw.r] = draw.size, draw.play.keywords if draw.size == 1 else {}
        return [["group"]]

    selection = Demonstrations(SimpleNamespace(select=select), sampled=share)
    for r in range(8):
        assert selection.select(SimpleNamespace(r=r, size=4, play=lambda: None)) == [["group"]]
    assert [r for r, (size, _) in seen.items() if size == 4] == sampled
    assert all(own == ({} if size == 4 else {"play": selection.play}) for size, own in seen.values())


def test_calls_of_tools_are_played_for_real(toy):
    folder = ROOT / "grpo/extras/demo/demo_models/calculator"
    task, renderer = Calculator(train_size=4, test_size=4), TokenizerRenderer(AutoTokenizer.from_pretrained(folder))

    class Nothing:
        context = None

        def sample(self, *_):
            raise AssertionError("a demonstration needs no engine")

    for [sample] in demonstrated((Nothing(), renderer), task):
        calls = [turn for step in sample.trajectory.steps for turn in step.action.message.tool_calls]
        assert len(calls) == len(sample.turns) - 1 and sample.reward.correct


def test_loss_and_gradient_of_sft(toy_model, parts):
    """The mean over all tokens of the answers, whatever the lengths, microbatches and layout."""
    groups = demonstrated(parts)
    expected = []
    toy_model.zero_grad()
    for [sample] in groups:
        [turn] = sample.turns
        ids = torch.tensor([turn.ids])
        logprobs = toy_model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected.append(-logprobs[len(turn.prompt_ids) - 1 :])
    loss = torch.cat(expected).mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in toy_model.parameters()])
    of = {"imitation": Imitation(sampled=1.0), "policy_coef": 0.0, "teacher": Teacher()}
    for settings in ({}, {"max_tokens_per_microbatch": 40}, {"layout": "padded"}, {"layout": "packed"}):
        module = taught(toy_model, parts, **of, **settings)
        got, metrics = moved(toy_model, module, batch(groups))
        assert metrics["imitation/loss"] == pytest.approx(loss.item(), abs=1e-6)
        torch.testing.assert_close(got, gradient, atol=1e-6, rtol=0)
        assert "rollout/logprob_gap" not in metrics  # nobody sampled these tokens


def test_a_mean_of_each_demonstration(toy, parts):
    """Demonstrations of 2 and 4 tokens, cut into single rows: each has half of the loss; of all tokens they have 2/6 and 4/6."""

    def cut(sample: Sample, n: int) -> Sample:
        [turn] = sample.turns
        return replace(sample, turns=(replace(turn, completion=Completion((40, 41, 42, 43)[:n], (-0.5,) * n, "stop")),))

    def gradient(samples: list[Sample], **settings) -> torch.Tensor:
        of = {"teacher": Teacher(), "policy_coef": 0.0, "max_tokens_per_microbatch": 1}
        module = taught(policy, parts, imitation=Imitation(sampled=1.0, **settings), **of)
        return moved(policy, module, batch([[sample] for sample in samples]))[0]

    policy, pairs = fresh(toy), zip(sampled(parts, count=2, size=1), (2, 4), strict=True)
    both = [cut(one, n) for [one], n in pairs]
    short, long = (gradient([one]) for one in both)
    torch.testing.assert_close(gradient(both), short / 3 + long * 2 / 3, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient(both, reduce="sequence"), short / 2 + long / 2, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="no trl")
def test_loss_and_gradient_are_those_of_trl(toy, toy_model, parts, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    groups = demonstrated(parts)
    talks = [
        {"prompt": [{"role": "user", "content": s.example["question"]}],
         "completion": [{"role": "assistant", "content": s.example["solution"]}]}
        for [s] in groups
    ]  # fmt: skip
    settings = SFTConfig(
        str(tmp_path), per_device_train_batch_size=3, use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", disable_tqdm=True, completion_only_loss=True, max_length=None, loss_type="nll",
    )  # fmt: skip
    of_toy = AutoTokenizer.from_pretrained(toy)
    trainer = SFTTrainer(toy_model, settings, train_dataset=Dataset.from_list(talks), processing_class=of_toy)
    inputs = next(iter(trainer.get_train_dataloader()))
    assert int((inputs["labels"] != -100).sum()) == sum(sample.length for [sample] in groups)
    toy_model.zero_grad()
    theirs = trainer.compute_loss(toy_model, inputs)
    theirs.backward()
    gradient = torch.cat([p.grad.flatten() for p in toy_model.parameters()])
    module = taught(toy_model, parts, Teacher(), imitation=Imitation(sampled=1.0), policy_coef=0.0)
    ours, metrics = moved(toy_model, module, batch(groups))
    assert metrics["imitation/loss"] == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=0)


# -- held-out rows


def test_the_loss_of_held_out_rows_by_a_plain_pass(toy_model, parts):
    """The mean over all tokens, or of each row; rows without a demonstration, or with a long one, are left out."""
    rows, teacher = [TASK.examples("test")[i] for i in range(3)], Teacher()
    module = taught(toy_model, parts, teacher, imitation=Imitation(sampled=1.0), policy_coef=0.0)
    by_hand, weights = [], []
    for example in rows:
        prompt = parts[1].prompt_ids(State(TASK.build(example).start().messages).messages)
        answer = parts[1].answer_ids(demonstration_of(TASK, example)[0])
        ids = torch.tensor([[*prompt, *answer]])
        logprobs = toy_model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        by_hand.append(-float(logprobs.detach().mean()))
        weights.append(len(answer))
    plan = SimpleNamespace(sampling=Sampling(max(weights)), limits=Limits(), num_rollouts=4)
    rollouts = SimpleNamespace(task=TASK, plan=plan, renderer=parts[1], engine=parts[0], seed=0)
    whole = sum(loss * n for loss, n in zip(by_hand, weights, strict=True)) / sum(weights)
    show = Demonstrations()
    assert show.loss(module, rollouts, rows) == pytest.approx(whole, abs=1e-5)
    assert show.loss(module, rollouts, rows, "sequence") == pytest.approx(sum(by_hand) / 3, abs=1e-5)
    rollouts.plan.sampling = Sampling(max(weights) - 1)
    assert show.loss(module, rollouts, [rows[weights.index(max(weights))]]) is None

    class Evaluated(EvaluationCallback):
        def __init__(self, evaluator) -> None:
            self.evaluator, self.examples = evaluator, {"test": rows, "train": []}
            self.rollout = SimpleNamespace(ahead=SimpleNamespace(settle=lambda: settled.append(1)))

    settled, rollouts.plan.sampling = [], Sampling(max(weights))
    module._trainer = SimpleNamespace(callbacks=[Evaluated(Evaluator(Sampling(9, temperature=0.0), every=2, limit=1))])
    found = [show.held_out(module, rollouts, at, "token") for at in (1, 2, 4)]
    expected = {"imitation/held_out": pytest.approx(by_hand[0], abs=1e-5)}
    assert found == [{}, expected, expected] and len(settled) == 2  # nobody else uses the task meanwhile


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("algo=opd teacher.model.path=x", "set algo.teacher.divergence=reverse"),
        ("algo=opd_discounted teacher.model.path=x", "set algo.teacher.divergence=reverse"),
        ("algo=sft selection.sampled=0.5", "or take selection=right"),
    ],
)
def test_what_needs_the_policys_own_tokens_is_refused(words, line):
    with pytest.raises(UserError, match=line):
        check_teaching(None, composed("train", [*words.split(), "selection=demonstrations", "output_dir=."]))


# -- beside the samples


def test_rows_beside_the_samples_leave_the_policys_gradient(toy_model, parts):
    groups = sampled(parts)
    alone, _ = moved(toy_model, taught(toy_model, parts, Teacher()), batch(groups, SIGNAL))

    def with_rows(weight: float, **settings) -> torch.Tensor:
        module = taught(toy_model, parts, imitation=Imitation(given=weight), **settings)
        return moved(toy_model, module, batch(groups, SIGNAL))[0]

    only = with_rows(1.0, policy_coef=0.0)
    assert float(only.norm()) > 0.1
    torch.testing.assert_close(with_rows(1.0) - only, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(with_rows(0.0), alone, atol=1e-7, rtol=0)
    torch.testing.assert_close(with_rows(2.0, policy_coef=0.0), 2 * only, atol=1e-6, rtol=0)
    torch.testing.assert_close(with_rows(1.0, max_tokens_per_microbatch=40), with_rows(1.0), atol=1e-6, rtol=0)
    as_sft = taught(toy_model, parts, Teacher(), imitation=Imitation(sampled=1.0), policy_coef=0.0)
    torch.testing.assert_close(only, moved(toy_model, as_sft, batch(demonstrated(parts)))[0], atol=1e-6, rtol=0)


def test_the_fields_of_the_rows_beside(toy_model, parts):
    rollout = batch(sampled(parts), SIGNAL)
    module = taught(toy_model, parts, imitation=Imitation(given=0.5))
    tokens, given = Beside().extended(rollout.tokens, rollout, module.parts["teacher"].rollouts)
    plain, of = collate(demonstrated(parts)), slice(6, 9)
    assert len(tokens) == 9 and tokens.sample.tolist() == [0, 1, 2, 3, 4, 5, 0, 2, 4]
    assert tokens.rows(of).sequences() == plain.sequences()  # the demonstrations, after the very prompts
    assert tokens.rows(slice(0, 6)).sequences() == rollout.tokens.sequences()
    assert not tokens.mask[of].any() and not given[:6].any() and int(given.sum()) == int(plain.mask.sum())
    assert (tokens.turn[of] == -1).all() and tokens.given[of].isnan().all() and not tokens.fresh[of].any()
    batch_of = module.parts["teacher"].assign(rollout.tokens, rollout)
    assert torch.equal(batch_of.imitation, 0.5 * given) and (batch_of.temperature[given] == 1).all()
    assert not batch_of.temperature[:6].any()  # the run's


def test_what_is_left_out_beside_the_samples_is_said_once(toy_model, parts, caplog):
    rollout, rollouts = batch(sampled(parts), SIGNAL), taught(toy_model, parts).parts["teacher"].rollouts
    lengths, teacher = [sample.length for [sample] in demonstrated(parts)], Beside()
    plan = SimpleNamespace(sampling=Sampling(max(lengths) - 1))
    short = SimpleNamespace(task=rollouts.task, renderer=rollouts.renderer, plan=plan)
    kept = sum(length < max(lengths) for length in lengths)
    for _ in range(2):
        tokens, _ = teacher.extended(rollout.tokens, rollout, short)
        assert len(tokens) == 6 + kept
    line = f"{3 - kept} of 3 examples of a rollout have no demonstration of at most max_tokens={max(lengths) - 1}"
    assert caplog.text.count(line) == 1


# -- by source


def test_parts_by_source(toy_model, parts):
    """Source a learns from rewards, source b from its samples alone: the gradients of two runs, each with its own denominator."""
    groups = sampled(parts)
    named = [
        [replace(s, example={**s.example, "source": name}) for s in group]
        for name, group in zip("aba", groups, strict=True)
    ]
    by = {"a": {"imitation": 0}, "b": {"policy": 0, "imitation": 2}}
    both = taught(toy_model, parts, Teacher(), imitation=Imitation(sampled=1.0), by_source=by)
    got, _ = moved(toy_model, both, batch(named, SIGNAL))
    policy, _ = moved(toy_model, taught(toy_model, parts, Teacher()), batch([groups[0], groups[2]], SIGNAL[[0, 2]]))
    imitate = taught(toy_model, parts, Teacher(), imitation=Imitation(sampled=1.0), policy_coef=0.0)
    imitation, _ = moved(toy_model, imitate, batch([groups[1]], SIGNAL[:1]))
    torch.testing.assert_close(got, policy + 2 * imitation, atol=1e-6, rtol=0)


def test_the_weights_of_sources_are_those_of_the_rows_of_a_minibatch(toy_model, parts):
    lessons = taught(toy_model, parts, Teacher(), by_source={"b": {"policy": 3}}).parts["teacher"]
    lessons.of_policy, last = torch.tensor([[1.0], [1.0], [3.0]]), torch.tensor([2])
    minibatch = collate(sampled(parts)).rows(last)
    minibatch = lessons.weigh(replace(minibatch, row=last, weights=torch.ones_like(minibatch.rollout_logprobs)), 1)
    assert (minibatch.weights == 3).all()


def test_mistakes_are_one_line(tmp_path):
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "b": "x"}\n{"prompt": "2?", "b": "y"}\n')
    task = f"task=jsonl task.path={rows} task.rewards=format rollout.prompts=1 output_dir={tmp_path}".split()
    assert "no demonstration to learn from" in told("algo=sft", *task)
    assert "no demonstration to learn from" in told("teacher=rows", "algo.imitation.given=1", *task)
    assert "algo.imitation.given=0" in told("teacher=rows", *task)
    assert "no demonstration to learn from" in told("algo=sft", *task, "task.demonstration=c")
    line = told("teacher=tokens", "algo.by_source={gsm8k: {policy: 0}}", f"output_dir={tmp_path}")
    assert "'gsm8k'" in line and "source" in line
    assert "policy" in told("teacher=tokens", "algo.by_source={gsm8k: {reward: 0}}", f"output_dir={tmp_path}")


@pytest.mark.slow
def test_sft_on_the_demo_raises_accuracy_and_resumes_as_it_was(tmp_path):
    """A stopped and resumed run has the weights of an uninterrupted one, bit by bit."""

    def run(name: str, *more: str) -> None:
        words = (
            f"algo=sft preflight=off forecast=false logger=csv callbacks=[checkpoint] hydra.run.dir={tmp_path / name}"
        )
        words += " rollout.prompts=32 rollout.num_rollouts=16 eval.every=16 eval.limit=60 callbacks.checkpoint.every=8"
        done = command("train.py", *words.split(), *more)
        assert done.returncode == 0, done.stderr

    run("whole")
    run("rest", f"ckpt_path={tmp_path}/whole/checkpoints/00008.ckpt")
    one, two = (state(tmp_path / name)["state_dict"] for name in ("whole", "rest"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    first, *_, last = (row["eval/accuracy"] for row in rows(tmp_path / "whole") if "eval/accuracy" in row)
    assert last > first + 0.3
    shown = [row for row in rows(tmp_path / "whole") if "imitation/held_out" in row]
    assert len(shown) == 1 and 0.7 < shown[0]["imitation/held_out"] / shown[0]["imitation/loss"] < 1.5


def test_right_and_whole_samples_are_imitated():
    """The first is wrong, the second right, the third right and cut short; a group without a second is left out."""

    def sample(correct: bool, truncated: bool = False) -> Sample:
        return Sample({}, said("4", truncated=truncated), (), Reward(float(correct), correct))

    first, second = [sample(False), sample(True), sample(True, truncated=True)], [sample(False)]
    groups = SimpleNamespace(select=lambda draw: [first, second])
    assert Right(groups).select(SimpleNamespace(r=0)) == [[first[1]]]
    groups.select = lambda draw: [second, [first[2]]]
    with pytest.raises(UserError, match="rollout 1 has no sample that is right and complete"):
        Right(groups).select(SimpleNamespace(r=0))
