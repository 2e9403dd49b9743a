"""examples/grpo_in_one_file.py: the same numbers as the library's, on the same samples."""

import ast
import random
import re
from dataclasses import replace

import grpo_in_one_file as one_file
import pytest
import torch
from conftest import ROOT, compose_config, preset
from hydra.utils import instantiate
from transformers import AutoTokenizer

import eval as eval_script
from grpo.models.logprobs import completion_logprobs
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import Scores, TokenBatch
from tasks.wordmath import EVENTS, NAMES, THINGS

SOURCE = (ROOT / "examples" / "grpo_in_one_file.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def policy():
    return Pretrained(str(one_file.BASE)).model(), AutoTokenizer.from_pretrained(one_file.BASE)


def test_it_is_short_and_imports_nothing_of_ours():
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert names == {"pathlib", "random", "re", "time", "torch", "transformers"}
    assert SOURCE.count("\n") <= 150


def test_its_settings_are_those_of_the_demo():
    config = compose_config("output_dir=.")
    rollout, optim = config.rollout, config.optim
    assert (rollout.prompts, rollout.group_size, rollout.num_rollouts) == (16, 8, one_file.ROLLOUTS)
    assert (16, 8, config.max_tokens) == (one_file.QUESTIONS, one_file.GROUP, one_file.MAX_TOKENS)
    assert config.algo.num_epochs * config.algo.num_minibatches == one_file.UPDATES
    assert one_file.CLIP == config.algo.surrogate.low == config.algo.surrogate.high
    assert optim.optimizer._target_ == "torch.optim.AdamW" and optim.optimizer.weight_decay == 0
    assert (one_file.LEARNING_RATE, list(one_file.BETAS)) == (optim.optimizer.lr, optim.optimizer.betas)
    assert optim.max_grad_norm == one_file.MAX_GRAD_NORM


def test_its_problems_are_told_in_the_same_sentences_and_have_the_answers_of_their_story():
    ours = {f"{event.text} {event.question}".strip().replace("{each}", "{m}") for event in EVENTS}
    theirs = {text.replace("{a}", "{name}").replace("{b}", "{friend}") for text, _, _ in one_file.EVENTS}
    assert (ours, one_file.NAMES, one_file.THINGS) == (theirs, list(NAMES), list(THINGS))
    made = dict(one_file.make_problem(random.Random(seed)) for seed in range(300))
    signs = {"finds": 1, "buys": 1, "gives": 1, "loses": -1}
    checked = 0
    for question, answer in made.items():
        first, *rest = question.split(". ")
        name, number = first.split()[0], int(first.split()[2])
        if any(word in question for word in ("all", "times")):
            continue
        for sentence in rest[:-1]:
            amounts = [int(n) for n in re.findall(r"\d+", sentence)]
            gone = sentence.startswith(f"{name} gives")
            sign = -1 if gone else next(sign for verb, sign in signs.items() if f" {verb} " in sentence)
            number += sign * amounts[0] * (amounts[1] if len(amounts) == 2 else 1)
        assert str(number) == answer, question
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("\\boxed{21}", 1), ("3*7=21", 0), ("\\boxed{21} \\boxed{20}", 0), ("\\boxed{2} \\boxed{21}", 1), ("\\boxed{", 0)],
)
def test_the_last_box_counts(answer, reward):
    assert one_file.reward(answer, "21") == reward


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_one_update_has_the_librarys_numbers(policy, layout):
    """Advantages, log-probabilities, loss and gradient agree on the policy's answers; it has moved since, so the clip acts."""
    model, tokenizer = policy
    torch.manual_seed(0)
    problems = [one_file.make_problem(random.Random(seed)) for seed in range(6)]
    ids, mask, answers = one_file.sample(model, tokenizer, [question for question, _ in problems], 8)
    rewards = [one_file.reward(answer, problems[i // 8][1]) for i, answer in enumerate(answers)]
    rewards = torch.tensor(rewards).view(6, 8)
    assert 0 < (rewards.std(dim=1) > 0).sum() < 6  # groups with and without a signal
    width = mask.shape[1]
    noise = 0.3 * torch.randn(mask.shape)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    advantages = one_file.group_advantages(rewards).flatten()
    logprobs = one_file.token_logprobs(model, tokenizer, ids, width)
    old = logprobs.detach() + noise
    loss = one_file.grpo_loss(logprobs, old, advantages, mask)

    algorithm, nothing = preset(), torch.zeros(6, 8)
    scores = Scores(rewards, {"correct": rewards}, nothing, nothing, nothing.bool())
    seen = (ids != tokenizer.pad_token_id).long()
    tokens = TokenBatch(ids, seen, mask, torch.zeros(mask.shape), torch.arange(48))
    tokens = algorithm.credit(scores, tokens)
    theirs, entropy = completion_logprobs(model, tokens, 1.0, layout=layout)
    tokens = replace(tokens, old_logprobs=old * mask, weights=algorithm.weights(tokens.mask, tokens.sample))
    their_loss, logged = algorithm.loss(theirs, entropy, tokens)

    clipped = (logged["clip_fraction_low"] + logged["clip_fraction_high"])[mask]
    assert 0.01 < clipped.mean() < 0.9
    exact = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(advantages[:, None] * mask, tokens.advantages, **exact)
    torch.testing.assert_close(logprobs[mask], theirs[mask], rtol=0, atol=1e-5)  # of up to -15: rounding errors
    torch.testing.assert_close(loss, their_loss, **exact)
    torch.testing.assert_close(gradient(loss), gradient(their_loss), **exact)


@pytest.mark.slow
def test_its_accuracy_is_that_of_the_librarys_evaluation(policy, tmp_path):
    config = compose_config("eval.limit=200", f"output_dir={tmp_path}", name="eval")
    ours = eval_script.evaluate(config, [])
    rows = instantiate(config.task).examples("test")[:200]
    theirs = one_file.accuracy(*policy, [(row["question"], row["answer"]) for row in rows])
    assert theirs == pytest.approx(ours, abs=0.01)  # a tie of the two best tokens may round differently
    assert ours == pytest.approx(0.27, abs=0.01)  # the README's number
