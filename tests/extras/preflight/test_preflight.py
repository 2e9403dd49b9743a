"""Preflight: each check finds the fault that is planted for it, and no other check does; sound runs pass."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from conftest import EXAMPLES, compose_config
from helpers.runs import rows
from tokenizers import Regex, decoders, normalizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from grpo.apps.cli import one_line_errors
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.scoring import UNKNOWN
from grpo.env.tokens import Completion
from grpo.env.types import Reward, SingleTurn, State, Trajectory
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.demo.demo_model import SHIPPED
from grpo.extras.forecast.parts import Part
from grpo.extras.preflight import CHECKS, allowance, data, episodes, learning, rounding, sampling
from grpo.extras.preflight import callback as preflight
from grpo.extras.preflight import probe as probing
from grpo.extras.preflight.allowance import Allowance, added_tokens
from grpo.extras.preflight.checked import mean_gap
from grpo.extras.preflight.plan import RunPlan, disk, duration, plan_of
from grpo.extras.preflight.plan.disk import checkpoint_bytes
from grpo.extras.preflight.probe import Probe
from grpo.models.logprobs import completion_logprobs
from grpo.objectives.advantage import group_advantages
from grpo.rollout.collate import collate
from grpo.rollout.types import Sample
from grpo.runs.run import Run
from grpo.system import distributed
from grpo.system.distributed import one_pass
from grpo.system.errors import PreflightError, UserError
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.callbacks.samples import Samples
from tasks.jsonl import Jsonl
from train import train

SMALL = "callbacks=none forecast=false rollout.group_size=4 task.train_size=50 task.test_size=20 logger=csv".split()


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> Iterator[tuple[Probe, dict]]:
    """The probe and the verdicts of a sound run with a reference."""
    found: list[Probe] = []
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        run = preflight.outcome
        patch.setattr(preflight, "outcome", lambda check, probe: found.append(probe) or run(check, probe))
        with pytest.raises(SystemExit) as ended:
            train(compose_config(*SMALL, "algo/kl=loss", "preflight=only", f"output_dir={folder}"))
    assert ended.value.code == 0
    yield found[0], Run(folder).manifest


@pytest.fixture
def probe(checked, monkeypatch) -> Probe:
    """A new probe of that run, whose objects a test may change through `monkeypatch`."""
    sound, _ = checked
    monkeypatch.setattr(sampling, "PATIENCE", 1e9)  # as many draws on a slow machine
    monkeypatch.setattr(episodes, "PATIENCE", 1e9)  # and all groups are scored again
    return again(sound)


def again(sound: Probe) -> Probe:
    """A probe of the same run that has played nothing yet."""
    return Probe(*parts_of(sound), allowance=Allowance(80, fixed=1e9))


def parts_of(probe: Probe) -> tuple:
    """Return what a probe of the same run is made of."""
    return probe.module, probe.rollouts, probe.examples, probe.precision, probe.tokenizer


def failed(probe: Probe) -> set[str]:
    return {name for name, check in CHECKS.items() if preflight.outcome(check, probe).result == "FAIL"}


def test_a_sound_run_passes_every_check_and_keeps_the_verdicts(checked, probe):
    _, manifest = checked
    assert manifest["status"] == "finished"
    assert list(manifest["preflight"]) == list(CHECKS)
    skipped = {name for name, verdict in manifest["preflight"].items() if verdict["result"] != "PASS"}
    assert (
        skipped == {"the devices' gradients add up", "turns share a row", "prompts have their start token"}
        and manifest["rounding"] == 3e-5
    )
    assert failed(probe) == set()


def test_the_plan_of_that_run(checked, probe):
    """80 rollouts of 16 prompts with 4 samples over 50 rows; evaluations of 20 problems before them and after every 10th."""
    plan = RunPlan(**checked[1]["plan"])
    assert plan.rollout_time > 0 and plan.update_time > 0 and plan.evaluation_time > 0
    work, cost = plan.lines()
    assert work == (
        "plan: 80 rollouts x 64 samples x at most 40 tokens, 80 updates in microbatches of 2,048 tokens, 25.6 passes over "
        "50 rows, 9 evaluations of 20 problems"
    )
    assert cost.startswith(f"plan: about {duration(plan.seconds)} (rollouts ")
    shared = replace(plan, devices=2, memory=10**9).lines()
    assert "microbatches of 2,048 tokens on 2 devices, 25.6" in shared[0] and "1.00 GB of memory on each" in shared[1]
    checkpoint, parts = (
        Checkpoint(None, "", 20),
        [Part("so far", 7), Part("weights", 4), Part("optimizer", 10, phase="update")],
    )
    callbacks = [checkpoint, Samples("", every=2)]
    given = plan_of(probe, Evaluator(Sampling(8), limit=10, every=0), callbacks, parts, timed=True)
    trained = sum(p.nbytes for p in probe.module.policy.parameters())
    assert given.memory == 21 and given.evaluations == given.problems == given.evaluation_time == 0
    tables = given.disk - (6 * trained + 3 * 10)
    assert tables == pytest.approx(40 * 2 * 20_000, rel=0.9)
    # the newest two and one that is being written, without the optimizer; last, best, one that is being written, and 3 of 4 steps
    lean = Checkpoint(None, "", 20, history=5, history_keep=3, only_model=True)
    assert checkpoint_bytes(probe, parts, lean) == (3 + 3 + 3) * trained
    assert [duration(s) for s in (59, 90, 7200, 200_000)] == ["59 s", "1.5 min", "2.0 h", "2.3 days"]


def test_a_weight_that_is_not_finite(probe):
    weight = probe.module.policy.model.norm.weight
    before = weight.detach().clone()
    weight.data[3] = torch.inf
    found = preflight.outcome(CHECKS["the weights are whole"], probe)
    weight.data.copy_(before)
    assert found.result == "FAIL" and found.compared.endswith("1 not finite") and "model.norm.weight" in found.remedy


def test_prompts_that_do_not_depend_on_the_row(checked, probe, monkeypatch):
    ids = checked[0].groups[0][0].turns[0].prompt_ids
    monkeypatch.setattr(type(probe.rollouts.renderer), "prompt_ids", lambda *_: ids)
    found = preflight.outcome(CHECKS["prompts differ, answers end"], probe)
    assert found.result == "FAIL" and found.compared == "1 different prompts of 8"


def test_answers_that_never_end(probe, monkeypatch):
    plan = probe.rollouts.plan
    monkeypatch.setattr(probe.rollouts, "plan", replace(plan, sampling=replace(plan.sampling, max_tokens=2)))
    found = preflight.outcome(CHECKS["prompts differ, answers end"], probe)
    assert (
        found.result == "FAIL"
        and "32 of 32 answers cut short, 2 tokens each of at most 2" in found.compared
        and "max_tokens" in found.remedy
    )
    found = preflight.outcome(CHECKS["there is something to learn"], probe)
    assert found.result == "FAIL" and found.remedy == "all answers are cut short: raise max_tokens"


def test_most_answers_cut_short_are_a_warning(probe, caplog):
    """59 of 64 answers of a real model were cut short, and it was a PASS. A reward for short answers may begin so."""
    cut = {"end": "truncated"}
    groups = [[replace(s, trajectory=replace(s.trajectory, **cut)) for s in group] for group in probe.groups]
    groups[0][0] = replace(groups[0][0], trajectory=replace(groups[0][0].trajectory, end="answered"))
    probe.__dict__["played"] = [(groups, 1.0)]
    found = preflight.outcome(CHECKS["prompts differ, answers end"], probe)
    assert found.result == "WARN" and "31 of 32 answers cut short" in found.compared and "max_tokens" in found.remedy
    callback = preflight.PreflightCallback("on", SimpleNamespace(), SimpleNamespace(), {})
    callback.verdicts = {"prompts differ, answers end": found}
    callback.act_on_verdicts()  # the run goes on
    assert "31 of 32 answers cut short" in caplog.text


def test_an_answer_longer_than_its_own_state_allows(probe):
    [first, *others], *groups = probe.groups
    step = first.trajectory.steps[0]
    short = replace(step, state=replace(step.state, max_tokens=1))
    first = replace(first, trajectory=replace(first.trajectory, steps=(short,)))
    probe.__dict__["played"] = [([[first, *others], *groups], 1.0)]
    found = preflight.outcome(CHECKS["prompts differ, answers end"], probe)
    assert found.result == "FAIL" and found.compared == f"an answer has {first.length} tokens of at most 1"


@pytest.mark.parametrize("mode", ["on", "only", "warn"])
def test_a_check_that_raises_fails_and_ends_the_run_unless_it_only_warns(mode, caplog):
    failure = preflight.outcome(lambda probe: 1 / 0, None)
    assert failure.result == "FAIL" and "ZeroDivisionError" in failure.compared
    callback = preflight.PreflightCallback(mode, SimpleNamespace(), SimpleNamespace(), {})
    callback.verdicts = {"a check": failure}
    if mode == "warn":
        callback.act_on_verdicts()
        assert "preflight failed: a check: " in caplog.text
    else:
        with pytest.raises(PreflightError, match="preflight failed: a check: "):
            callback.act_on_verdicts()


def test_the_gap_is_the_mean_over_sampled_tokens():
    tokens = SimpleNamespace(mask=torch.tensor([[True, True, False, False]]))
    assert mean_gap(torch.tensor([[1.0, -2.0, 50.0, 0.0]]), torch.zeros(1, 4), tokens) == 1.5


def test_a_start_token_that_is_never_put_in_front(probe, monkeypatch):
    """The place alone tells this model the next token, and it has learned places behind a start token."""
    asked = [group[0].turns[0].prompt_ids for group in probe.groups]
    assert 8 < max(map(len, asked)) < 120
    tokenizer = deepcopy(probe.tokenizer)
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(next(i for i in range(421) if i != asked[0][0]))
    sizes = {"vocab_size": 421, "n_embd": 128, "n_layer": 1, "n_head": 1, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False)).eval()
    for p in model.parameters():
        p.data.zero_()
    model.transformer.ln_f.weight.data.fill_(1)
    model.transformer.wpe.weight.data.copy_(torch.eye(128))
    for prompt in asked:
        for place, token in enumerate(prompt):
            model.lm_head.weight.data[token, place] = 1  # the start token, at place 0, comes before the prompt's first
    monkeypatch.setattr(probe, "tokenizer", tokenizer)
    check = CHECKS["prompts have their start token"]
    assert preflight.outcome(check, probe).result == "PASS"  # the demo's model knows no such token
    monkeypatch.setitem(probe.module._modules, "policy", model)
    found = preflight.outcome(check, probe)
    assert found.result == "FAIL" and "nats likelier" in found.compared and "add_bos_token" in found.remedy


def test_a_tokenizer_that_loses_spaces(probe, monkeypatch):
    """As LlamaTokenizerFast does with the file of a DeepSeek R1 distillation."""
    probe_tokenizer, tokenizer = probe.tokenizer, deepcopy(probe.tokenizer)
    monkeypatch.setattr(probe, "tokenizer", tokenizer)
    check = CHECKS["tokens are those of the texts"]
    assert preflight.outcome(check, probe).result == "PASS"
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" ", "")])
    found = preflight.outcome(check, probe)
    assert found.result == "FAIL" and "loses the spaces" in found.compared and "tokenizer_class" in found.remedy
    code = "if x:\n    y"
    assert not episodes.loses_spaces(code, probe_tokenizer)
    tokenizer.backend_tokenizer.decoder = probe_tokenizer.backend_tokenizer.decoder
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), " ")  # as T5's
    assert episodes.loses_spaces(code, tokenizer) and not episodes.loses_spaces("if x: y", tokenizer)


def test_a_right_answer_that_the_reward_does_not_get(probe, monkeypatch):
    wrong, columns = probe.rows[2], probe.rollouts.task.columns
    monkeypatch.setattr(
        probe.rollouts.task, "columns", lambda row: columns(row) | ({"gold": "0"} if row == wrong else {})
    )
    assert failed(probe) == {"gold answers are right"}
    found = preflight.outcome(CHECKS["gold answers are right"], probe)
    assert found.compared == "7 of 8 right answers are right, 0 answers of other rows and 0 damaged ones are"


def test_a_reward_of_tokens_gets_those_of_the_made_up_answers(probe, monkeypatch):
    """As the policy would sample them: the text and the token that ends it."""
    gold, read = probe.rollouts.task.gold, probe.tokenizer.decode

    def score_group(row, said):
        texts = [read(one.steps[0].action.ids, skip_special_tokens=True) for one in said]
        assert texts == [one.answer for one in said]
        return [Reward(float(right), right) for right in (text == f"#### {gold(row)}" for text in texts)]

    monkeypatch.setattr(probe.rollouts.task, "score_group", score_group)
    found = preflight.outcome(CHECKS["gold answers are right"], probe)
    assert (found.result, found.compared[:30]) == ("PASS", "8 of 8 right answers are right")


def test_a_right_answer_that_is_not_what_the_file_has(tmp_path):
    """A reader that rounds, in any of four formats."""
    import pandas as pd

    golds = [9007199254740993 + 2 * i for i in range(8)]
    table = pd.DataFrame({"prompt": [f"{i}?" for i in range(8)], "gold": golds})
    for name, write in (
        ("a.jsonl", lambda file: table.to_json(file, orient="records", lines=True)),
        ("a.json", lambda file: table.to_json(file, orient="records")),
        ("a.csv", lambda file: table.to_csv(file, index=False)),
        ("a.parquet", table.to_parquet),
    ):
        write(tmp_path / name)
        task = Jsonl(str(tmp_path / name), "correct", gold="gold", splits={"train": "train"})
        rows = list(task.examples("train"))
        assert data.of_the_file(task, rows) == (8, [])
        rounded = SimpleNamespace(
            rollouts=SimpleNamespace(task=task), rows=[r | {"gold": float(r["gold"])} for r in rows]
        )
        found = data.gold(rounded)
        assert found.result == "FAIL" and found.compared == "8 of 8 right answers are not what the file has"
        assert found.remedy.startswith("'9007199254740993' is read as 9007199254740992.0: ")


def test_a_reward_that_sees_only_the_last_digit(probe, monkeypatch):
    """Answers with one digit are damaged in their last digit, so only they are safe."""
    gold = probe.rollouts.task.gold

    def score_group(row, said):
        ends = [trajectory.answer.strip("{}")[-1:] == gold(row)[-1] for trajectory in said]
        return [Reward(float(end), end) for end in ends]

    monkeypatch.setattr(probe.rollouts.task, "score_group", score_group)
    found = preflight.outcome(CHECKS["gold answers are right"], probe)
    long = sum(len(gold(row)) > 1 for row in probe.rows)
    assert found.result == "FAIL" and found.remedy == "the reward accepts wrong answers"
    assert f"{long} damaged ones are" in found.compared and long > 0


def test_a_reward_that_accepts_damaged_answers_alone(probe, monkeypatch):
    gold = probe.rollouts.task.gold

    def score_group(row, said):
        accepted = {f"#### {answer}" for answer in (gold(row), data.damaged(gold(row)))}
        return [Reward(float(good), good) for good in (one.answer in accepted for one in said)]

    monkeypatch.setattr(probe.rollouts.task, "score_group", score_group)
    found = preflight.outcome(CHECKS["gold answers are right"], probe)
    assert found.result == "FAIL" and found.remedy == "the reward accepts wrong answers"
    assert found.compared.endswith(", 0 answers of other rows and 8 damaged ones are")


def test_a_reward_of_the_wrong_sign(probe, monkeypatch):
    monkeypatch.setattr(
        probe.rollouts.task.rewards, "weights", [lambda now: -1.0 for _ in probe.rollouts.task.rewards.weights]
    )
    assert failed(probe) == {"rewards agree with correctness"}


def test_a_reward_without_relation_to_correctness(probe, monkeypatch):
    """Every answer is in the requested form, so right and wrong ones earn the same."""
    monkeypatch.setattr(probe.rollouts.task.rewards, "weights", [lambda now: 0.0, lambda now: 1.0])
    assert preflight.outcome(CHECKS["rewards agree with correctness"], probe).result == "PASS"


def test_a_probe_without_signal_asks_more_rows(probe, monkeypatch):
    row = next(group[0].example for group in probe.groups if len({sample.reward.value for sample in group}) == 1)
    monkeypatch.setattr(probing, "PROMPTS", 1)
    others = probe.rollouts.sampler.draw(0, 31)
    monkeypatch.setattr(probe.rollouts.sampler, "draw", lambda *_: [row, *others[7:]])
    found = preflight.outcome(CHECKS["there is something to learn"], again(probe))
    assert found.result == "PASS" and "1 of 3 groups have signal" in found.compared  # one at a time, until one has


def test_a_slow_probe_without_signal_asks_two_rows_at_a_time(probe, monkeypatch):
    """Eight of them may take more time than is left, and the first two may have signal."""
    for allowed, sizes in ((1e9, [8, 8, 8]), (0.0, [2] * 15)):
        slow = Probe(*parts_of(probe), allowance=Allowance(80, fixed=allowed))
        slow.__dict__["played"] = [(probe.groups[:2], 1.0), (probe.groups[2:], 1.0)][: 2 if allowed else 1]
        monkeypatch.setattr(slow, "play", lambda rows, first: (rows, first))
        assert [len(rows) for rows in slow.further()] == sizes


def test_signal_without_right_answers_is_not_called_fit(probe, monkeypatch):
    monkeypatch.setattr(
        probe.rollouts.task, "score_group", lambda row, said: [Reward(float(i), False) for i in range(len(said))]
    )
    found = preflight.outcome(CHECKS["there is something to learn"], probe)
    assert found.result == "WARN" and "0% solved, pass@4 0%, 8 of 8 groups have signal: no answer is" in found.compared
    # 0, 1, 2, 3 in each group: the deviation is the root of 5 / 4
    assert found.compared.endswith("reward differs by 1.1 within a group") and "mean_only" in found.remedy
    monkeypatch.setattr(probe.rollouts, "selection", SimpleNamespace(by="correct"))
    probe.chosen = probe.rows  # no further ones
    found = preflight.outcome(CHECKS["there is something to learn"], probe)
    assert found.result == "FAIL" and "0 of 8 groups have signal" in found.compared
    assert found.remedy == "only rewards differ: set selection.by=reward"


@pytest.mark.parametrize(("scale", "result"), [("group", "WARN"), ("batch", "WARN"), ("none", "PASS")])
def test_a_small_penalty_that_alone_differs_is_named_with_its_remedy(probe, monkeypatch, scale, result):
    """Each second sample pays 0.02: a deviation of 0.01, which a division by it makes as large as that of any reward."""
    part = lambda i: {"correct": 0.0, "calls": -0.02 * (i % 2)}  # noqa: E731
    rewards = lambda row, said: [Reward(part(i)["calls"], False, part(i)) for i in range(len(said))]  # noqa: E731
    monkeypatch.setattr(probe.rollouts.task, "score_group", rewards)
    algorithm = replace(probe.module.algorithm, advantage=partial(group_advantages, scale=scale))
    monkeypatch.setattr(probe.module, "algorithm", algorithm)
    found = preflight.outcome(CHECKS["there is something to learn"], probe)
    assert found.result == result and found.compared.endswith("; calls differs by 0.01 within a group")
    assert ("algo/advantage=mean_only" in found.remedy) == (result == "WARN")


def test_a_reward_that_is_always_the_same(probe, monkeypatch):
    monkeypatch.setattr(probe.rollouts.task, "score_group", lambda row, said: [Reward(1.0, correct=True)] * len(said))
    names = {"gold answers are right", "there is something to learn"}  # answers of other rows are right, too
    assert failed(probe) == names
    assert (
        preflight.outcome(CHECKS["there is something to learn"], probe).remedy
        == "all answers are right: take harder problems"
    )


def test_held_out_rows_among_the_training_rows(probe):
    train_rows, test_rows = (list(probe.examples[split]) for split in ("train", "test"))
    leaked = {**train_rows[3], "question": "Question 7: " + train_rows[3]["question"].upper().replace(".", " !")}
    probe.examples = {"train": train_rows, "test": [*test_rows[:19], leaked]}
    assert failed(probe) == {"held-out rows are new"}
    found = preflight.outcome(CHECKS["held-out rows are new"], probe)
    assert found.compared.startswith("1 of 20 held-out rows are training rows")


def test_worked_examples_that_all_prompts_share_make_no_near_duplicates():
    """Ten training prompts begin with the same 30 words; of two held-out prompts with them, one repeats a training question but
    for its last word."""
    shared = " ".join(f"example{i}" for i in range(30))
    own = [" ".join(f"word{row}of{i}" for i in range(12)) for row in range(12)]
    train = [{"prompt": f"{shared} {text}"} for text in own[:10]]
    test = [{"prompt": f"{shared} {own[11]}"}, {"prompt": f"{shared} {own[0].rpartition(' ')[0]} other"}]
    found = data.held_out(SimpleNamespace(examples={"train": train, "test": test}))
    assert found.compared == "0 of 2 held-out rows are training rows; 1 more share most runs of 8 words"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Problem: \uff21\uff22\uff23 has 1,000 cats", "abc has 1000 cats."),
        ("Q 3) Café — 2.0 apples", "cafe 2 apples"),
        ("Solve the following problem: x = 10,000,000", "X = 10000000"),
    ],
)
def test_a_text_written_otherwise_is_the_same(one, other):
    assert data.folded(one) == data.folded(other)


def test_a_mask_without_end_tokens(probe, monkeypatch):
    def collate(groups, first=()):
        tokens = collated(groups, first)
        last = tokens.mask.shape[1] - 1 - tokens.mask.int().flip(1).argmax(1)
        return replace(tokens, mask=tokens.mask & (torch.arange(tokens.mask.shape[1]) != last[:, None]))

    collated = probing.collate
    monkeypatch.setattr(probing, "collate", collate)
    assert (
        "the mask has every sampled token"
        in failed(probe)
        <= {"the mask has every sampled token", "draws follow the probabilities"}
    )


def test_another_temperature_in_the_trainer(probe, monkeypatch):
    monkeypatch.setattr(probe.module, "temperature", 0.9)
    assert failed(probe) == {"log-probabilities agree", "new weights reach the engine"}


def of_another_model(change) -> Callable[[Probe], None]:
    """Return what gives the engine a copy of the policy with a fault."""

    def planted(probe: Probe) -> None:
        other = deepcopy(probe.module.policy)
        with torch.no_grad():
            change(other)
        probe.rollouts.engine.load_weights(other, 0)

    return planted


def stale_layer(model) -> None:
    """As after an update that has moved each weight of the first layer by about a hundredth of their size."""
    for p in model.model.layers[0].parameters():
        p.add_(0.01 * p.square().mean().sqrt() * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))


FAULTS = {  # and whether it is found in 16 bits, too
    "temperature, 2 % less": (lambda probe: setattr(probe.module, "temperature", 0.98), True),
    "temperature, 2 % more": (lambda probe: setattr(probe.module, "temperature", 1.02), True),
    "a stale layer": (of_another_model(stale_layer), False),
    "no scale after the head": (of_another_model(lambda model: model.get_output_embeddings().weight.mul_(1.1)), True),
    "another base of rotations": (of_another_model(lambda model: model.model.rotary_emb.inv_freq.mul_(1.05)), True),
}


def test_differences_of_another_temperature():
    """Log-probabilities that are 1 above their mean fall by 2 %, those that are 2 below rise by 4 %; then one is 1 % off that."""
    above = torch.tensor([1.0, 1.0, -2.0])
    apart = torch.arange(3)
    assert sampling.warmer(-0.02 * above, above, apart) == pytest.approx((0.02, 0.0), abs=1e-9)
    heat, error = sampling.warmer(-0.02 * above + torch.tensor([0.01, -0.01, 0.0]), above, apart)
    # each of the first two has a sixth of the weight, so that the line is 5/6 as far from it as from the others' line
    assert heat == pytest.approx(0.02) and error == pytest.approx(2**0.5 * 0.01 / (5 / 6) / 6)


def test_one_rare_token_is_no_temperature():
    """64 tokens agree, and one that is 6 below the mean has 36 of 52 parts of the weight: whatever its noise, it says nothing."""
    above = torch.tensor([0.5, -0.5] * 32 + [-6.0])
    noise = torch.tensor([0.0] * 64 + [0.3])
    heat, error = sampling.warmer(noise, above, torch.arange(65))
    assert heat == pytest.approx(0.3 * 6 / 52) and abs(heat) > sampling.HEAT
    assert error == pytest.approx(heat, rel=0.1)


@pytest.mark.parametrize(("eps", "bound"), [(2.0**-8, 3 / 16), (2.0**-14, 2.0**-7), (0.0, 1e-4)])
def test_gradients_in_sixteen_bits_may_be_three_times_as_far_apart(eps, bound):
    assert learning.gradient_bound(SimpleNamespace(eps=eps)) == bound


def test_equal_beginnings_have_one_noise():
    """All 16 samples of a group begin after the same tokens, with the same error: it counts as one, not as 16."""
    above = torch.tensor([-0.7] * 16 + [0.5, -0.5] * 16)
    noise = torch.tensor([0.1] * 16 + [0.01, 0.01] * 16)
    alone = sampling.warmer(noise, above, torch.arange(48))
    together = sampling.warmer(noise, above, torch.tensor([0] * 16 + [*range(1, 33)]))
    assert alone[0] == together[0] > 6 * alone[1] and together[0] < 6 * together[1]
    # the 16 pull by 16 x 0.7 x (0.1 - 0.0707 x 0.7) and have 0.4949 of the weight of 15.84; the others add 0.0111 to the square
    assert together[1] == pytest.approx((1.12**2 + 0.01115) ** 0.5 / 15.84, rel=1e-4)


def test_tokens_after_the_same_tokens_have_a_place():
    """The second row begins as the first, and goes on otherwise; the third has another prompt before the same token."""
    both = [((1, 2), (4, 5, 6)), ((1, 2), (4, 7, 6)), ((1, 3), (4, 5))]
    turns = [probing.Turn(prompt, Completion(ids, (-1.0,) * len(ids), "stop")) for prompt, ids in both]
    tokens = collate([[Sample({}, Trajectory(()), (turn,), UNKNOWN) for turn in turns]])
    assert sampling.beginnings(tokens).tolist() == [0, 1, 2, 0, 1, 3, 4, 5]


def test_log_odds_are_compared_where_the_policy_is_unsure():
    """0.1 nats at a probability of 1/2 are 0.2 in log-odds, and 0.001 at 0.99 are 0.1; a sure token does not count."""
    logprobs = torch.tensor([0.5, 0.99, 0.9999]).log()
    assert rounding.odds(torch.tensor([0.1, -0.001, 1.0]), logprobs) == pytest.approx(0.15, rel=1e-4)
    assert rounding.odds(torch.ones(1), torch.zeros(1)) == 0


@pytest.mark.parametrize(("eps", "result"), [(2**-7, "FAIL"), (2**-23, "PASS")])
def test_log_odds_show_what_sixteen_bits_hide_in_nats(eps, result):
    """0.02 nats at a probability of 0.98 are within the bound in nats, and 1 in log-odds."""
    ours, mask = torch.full((2, 5), 0.98).log(), torch.ones(2, 5, dtype=torch.bool)
    tokens = SimpleNamespace(rollout_logprobs=ours + 0.02, mask=mask, sequences=lambda: [((1,), tuple(range(5)))] * 2)
    probe = SimpleNamespace(compared=tokens, passed=(ours, -ours), bounds=(0.06, 0.25), eps=eps)
    found = sampling.logprobs(probe)
    assert found.result == result and ("1 in log-odds, bound 0.25" in found.compared) == (result == "FAIL")


@pytest.mark.parametrize(("heat", "result"), [(0.02, "FAIL"), (0.002, "PASS")])
def test_another_temperature_shows_within_the_bound(heat, result):
    """Tokens half a nat above and below their mean: at 2 % more heat each is 0.01 nats off, which the bound of 0.06 allows."""
    above = torch.tensor([[0.5, -0.5] * 5] * 2)
    ours, mask = above - 1, torch.ones(2, 10, dtype=torch.bool)
    rows_of = [((prompt,), tuple(range(10))) for prompt in (1, 2)]
    tokens = SimpleNamespace(rollout_logprobs=ours - heat * above, mask=mask, sequences=lambda: rows_of)
    probe = SimpleNamespace(compared=tokens, passed=(ours, torch.ones(2, 10)), bounds=(0.06, 0.25), eps=2**-23)
    assert sampling.logprobs(probe).result == result


def test_rare_tokens_are_missing():
    """None of 100 draws is the token that has a twentieth: a probability of 0.95 to the power of 100, at one of four cuts."""
    drawn, shares = np.array([0] * 50 + [1] * 30 + [2] * 20), np.array([0.5, 0.3, 0.15, 0.05])
    assert sampling.missing(drawn, shares) == pytest.approx(4 * 0.95**100)
    assert sampling.missing(np.array([*drawn[:-5], *[3] * 5]), shares) > 1


@pytest.mark.parametrize(("later", "result"), [(0.2, "PASS"), (1e-7, "FAIL")])
def test_in_doubt_three_times_as_many_draws_decide(probe, monkeypatch, later, result):
    asked, p_values = [], iter([0.005, later])
    monkeypatch.setattr(sampling, "PATIENCE", 4.0)
    monkeypatch.setattr(sampling, "drawn_in", lambda _, context, *rest: asked.append(rest) or [(5, -1.0)] * 30)
    monkeypatch.setattr(sampling, "chances", lambda drawn, _: (2, next(p_values), 1.0))
    found = preflight.outcome(CHECKS["draws follow the probabilities"], probe)
    assert found.result == result and found.compared.startswith("60 draws")
    assert asked == [(4.0,), (12.0, 30)]


def test_few_draws_show_a_filter(probe, monkeypatch):
    """By chi-square alone, 500 draws do not tell that there is top_p=0.95."""
    sample = probe.rollouts.engine.sample
    assert len(probe.tokens)  # sampled before the fault is there
    monkeypatch.setattr(sampling, "MOST_DRAWS", 500)
    assert preflight.outcome(CHECKS["draws follow the probabilities"], probe).result == "PASS"
    other = lambda prompts, sampling, *more: sample(prompts, replace(sampling, top_p=0.95), *more)  # noqa: E731
    monkeypatch.setattr(probe.rollouts.engine, "sample", other)
    found = preflight.outcome(CHECKS["draws follow the probabilities"], probe)
    assert found.result == "FAIL" and found.compared.endswith(": rare tokens are missing")
    monkeypatch.setattr(sampling, "missing", lambda *_: 1.0)
    assert preflight.outcome(CHECKS["draws follow the probabilities"], probe).result == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("sixteen", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_bound_on_log_probabilities_finds_planted_faults(probe, monkeypatch, fault, sixteen):
    """The bound is measured, and in bfloat16 it is the precision of that type times 3 and a quarter of the logits' size."""
    if sixteen:
        monkeypatch.setattr(Probe, "eps", 2**-7)
    monkeypatch.setattr(probe.module, "temperature", 1.0)
    plant, found_in_16 = FAULTS.get(fault, (lambda probe: None, False))
    plant(probe)
    try:
        found = preflight.outcome(CHECKS["log-probabilities agree"], probe)
    finally:
        probe.rollouts.engine.load_weights(probe.module.policy, 0)
    assert found.result == ("FAIL" if fault and (found_in_16 or not sixteen) else "PASS"), found.compared


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"temperature": 0.8}, {"repetition_penalty": 1.2}])
def test_an_engine_that_draws_otherwise_than_it_says(probe, monkeypatch, change):
    """The log-probabilities that it reports are those of the run's own sampling."""
    sample = probe.rollouts.engine.sample

    def other(prompts, sampling, seeds, done=None):
        drawn = sample(prompts, replace(sampling, **change), seeds)
        if "temperature" in change:  # its reports are then of another temperature: take the trainer's
            turns = [probing.Turn(tuple(p), c) for p, c in zip(prompts, drawn, strict=True)]
            tokens = probing.collate([[Sample({}, Trajectory(()), (turn,), UNKNOWN) for turn in turns]])
            values = probe.trainer(tokens)[0]
            drawn = [
                replace(c, logprobs=tuple(v[m].tolist())) for c, v, m in zip(drawn, values, tokens.mask, strict=True)
            ]
        return drawn

    assert len(probe.tokens)  # sampled before the fault is there
    monkeypatch.setattr(probe.rollouts.engine, "sample", other)
    assert failed(probe) == {"draws follow the probabilities"}


def test_a_slow_engine_draws_as_often_as_it_can_in_four_seconds(probe, monkeypatch):
    """A draw takes 25 ms: 20 draws show that, and 140 more fill the four seconds, 64 at once as in the run. A
    token takes 2 ms in a pass: 100 draws of 20 tokens would fill them, too, so the engine reads no more for each."""
    sample, counts, contexts = probe.sample, [], set()
    probe.__dict__["token_seconds"] = 0.002
    monkeypatch.setattr(sampling, "PATIENCE", 4.0)
    monkeypatch.setattr(sampling, "time", SimpleNamespace(perf_counter=lambda: sum(counts) * 0.025))

    def drawn(prompts, *others, **named):
        counts.append(len(prompts))
        contexts.update(map(tuple, prompts))
        return sample(prompts, *others, **named)

    monkeypatch.setattr(probe, "sample", drawn)
    found = preflight.outcome(CHECKS["draws follow the probabilities"], probe)
    assert counts == [20, 64, 64, 12] and found.result == "PASS" and found.compared.startswith("160 draws")
    [context] = contexts
    assert len(context) == 20 and any(context == ids[i : i + 20] for ids in whole(probe) for i in range(len(ids)))
    probe.__dict__["token_seconds"] = 1.0
    counts.clear(), contexts.clear()
    preflight.outcome(CHECKS["draws follow the probabilities"], probe)
    assert {len(context) for context in contexts} == {8}


def whole(probe) -> list[tuple[int, ...]]:
    return [(*prompt, *ids) for prompt, ids in probe.compared.sequences()]


def test_the_time_of_an_update_where_the_probe_has_no_signal(probe, monkeypatch):
    """A plan of SmolLM2 on sums had no updates in it: two groups were played, both without a right answer, and one of the next
    eight had some. The rows of the probe are then timed, and count by the share of groups with signal."""
    equal = [[replace(s, reward=Reward(0.0, False)) for s in group] for group in probe.groups]
    probe.__dict__["played"] = [(equal, 1.0)]
    timed = []
    monkeypatch.setattr(probe.module.at_once, "fitting", lambda make, *_, **__: timed.append(make) or 8.0)
    found = preflight.outcome(CHECKS["there is something to learn"], probe)
    count, size = int(found.compared.partition(" groups")[0].rpartition(" ")[2]), len(equal)
    assert found.result == "PASS" and count > size
    share = int(found.compared.partition(" of ")[0].rpartition(" ")[2]) / count
    assert learning.seconds(probe) == pytest.approx(8.0 * share) and 0 < share < 1 and timed
    probe.live = 0.0
    assert learning.seconds(probe) == 0


def test_an_engine_that_keeps_old_weights(probe, monkeypatch):
    old = deepcopy(probe.module.policy)
    load = probe.rollouts.engine.load_weights
    monkeypatch.setattr(probe.rollouts.engine, "load_weights", lambda model, version: load(old, version))
    load(old, 0)
    assert failed(probe) == {"new weights reach the engine"}
    load(probe.module.policy, 0)


def test_an_engine_that_does_not_take_the_old_weights_back(probe, monkeypatch):
    engine, moved = probe.rollouts.engine, probe.rollouts.plan.num_rollouts + 1
    load = engine.load_weights

    def once(model, version):
        if version == moved:
            load(deepcopy(model), version)

    monkeypatch.setattr(engine, "load_weights", once)
    short = Probe(*parts_of(probe), allowance=Allowance(80, fixed=0.0))
    found = preflight.outcome(CHECKS["new weights reach the engine"], short)
    load(probe.module.policy, 0)
    assert found.result == "FAIL" and found.remedy.startswith("the engine keeps old weights or an old cache")


def test_moved_weights_have_a_version_of_no_rollout(probe, monkeypatch):
    """A server that keeps adapters by version would sample the next rollout with them."""
    load, versions = probe.rollouts.engine.load_weights, []
    monkeypatch.setattr(probe.rollouts.engine, "load_weights", lambda *args: versions.append(args[1]) or load(*args))
    assert preflight.outcome(CHECKS["new weights reach the engine"], probe).result == "PASS"
    assert versions == [probe.rollouts.plan.num_rollouts + 1, 0]


def test_a_reference_that_is_not_the_policy(probe):
    weight = next(probe.module.reference.copy.parameters())
    before = weight.detach().clone()
    weight.data.mul_(1.1)
    assert failed(probe) == {"the policy starts at its reference"}
    weight.data.copy_(before)


def test_something_random_in_the_policy(probe):
    head = probe.module.policy.lm_head
    hook = head.register_forward_hook(lambda module, args, out: out + 0.1 * torch.randn_like(out))
    found = preflight.outcome(CHECKS["the policy starts at its reference"], probe)
    hook.remove()
    assert found.result == "FAIL" and found.remedy == "something in the policy is random: set dropout to 0"


@pytest.mark.parametrize(("seconds", "cuts"), [(0.0, [1, 3, 6, 1]), (1e9, [1, 2])])
def test_a_loss_that_depends_on_its_microbatches(probe, monkeypatch, seconds, cuts):
    """Also where the first gradient has taken so long that only one other is made, padded and in two pieces."""
    loss, gradient_of, made = type(probe.module.algorithm).loss, learning.gradient_of, []
    wrong = lambda self, logprobs, *more: (loss(self, logprobs, *more)[0] / len(logprobs), {})  # noqa: E731
    monkeypatch.setattr(type(probe.module.algorithm), "loss", wrong)
    monkeypatch.setattr(learning, "slowest", lambda _: seconds)
    monkeypatch.setattr(learning, "gradient_of", lambda *given: made.append(given[2]) or gradient_of(*given))
    assert failed(probe) == {"the gradient ignores microbatches"}
    assert made == cuts


def test_a_device_that_adds_nothing_to_the_gradient(probe, monkeypatch):
    """This process has half of the rows, and pretends that the other device is there."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    for name in ("all_sum", "all_gather"):
        monkeypatch.setattr(distributed, name, lambda given: given)
    found = preflight.outcome(CHECKS["the devices' gradients add up"], probe)
    assert found.result == "FAIL" and found.compared.startswith("the sum over 2 devices and the whole")


def test_rounding_is_no_gradient(probe, monkeypatch):
    """A teacher that is the policy has a divergence of 0, and its gradients of 1e-8 differ by halves of themselves."""
    loss = type(probe.module.algorithm).loss
    rounded = lambda self, logprobs, *more: (1e-9 * loss(self, logprobs, *more)[0] / len(logprobs), {})  # noqa: E731
    monkeypatch.setattr(type(probe.module.algorithm), "loss", rounded)
    found = preflight.outcome(CHECKS["the gradient ignores microbatches"], probe)
    assert (found.result, found.compared) == ("SKIP", "the objective has no gradient on these rows")


def test_equal_rows_have_a_gradient_to_compare(probe):
    """A policy that is almost certain gives equal answers; their gradients must not cancel."""
    probe.few = probe.tokens.rows(torch.zeros(6, dtype=torch.long))
    assert preflight.outcome(CHECKS["the gradient ignores microbatches"], probe).result == "PASS"


def stale_tokenizer(probe: Probe, folder):
    """The run's tokenizer, where every digit has the id of the next one."""
    probe.tokenizer.save_pretrained(folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary |= {str(i): vocabulary[str((i + 1) % 10)] for i in reversed(range(10))} | {"9": vocabulary["0"]}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return AutoTokenizer.from_pretrained(folder)


def lies(probe: Probe, folder) -> dict:
    """Return for each lie the object, its attribute, what takes its place, and the check that finds it."""
    rollouts, module, said = probe.rollouts, probe.module, "tokens are those of the texts"
    renderer, engine, task, learns = rollouts.renderer, rollouts.engine, rollouts.task, type(module.algorithm).weights
    prompt_ids, sample, score, play = renderer.prompt_ids, engine.sample, task.score_group, rollouts.play
    longer = lambda asked: replace(asked, max_tokens=asked.max_tokens + 20)  # noqa: E731

    def permuted(*args):
        ids = prompt_ids(*args)
        return (*ids[:3], *reversed(ids[3:-3]), *ids[-3:])

    def neighbours(*args):
        groups = play(*args)
        return [[replace(one, turns=group[i - 1].turns) for i, one in enumerate(group)] for group in groups]

    def one_group_on(*args):
        groups = play(*args)
        return [[replace(one, reward=other.reward) for one, other in zip(*pair, strict=True)]
                for pair in zip(groups, [*groups[1:], groups[0]], strict=True)]  # fmt: skip

    def turn_later(groups, first=()):
        tokens = collate(groups, first)
        return replace(tokens, turn=tokens.turn + 1)

    def sharper(model, tokens, entropy):
        return one_pass(model, completion_logprobs, tokens, 0.9, entropy, *module.layout)

    def uneven(*args):
        weights = learns(*args)
        more = weights * (1 + torch.arange(len(weights)).remainder(2)[:, None])
        return more * (weights.sum() / more.sum())

    stale = type(renderer)(stale_tokenizer(probe, folder))
    mixed, weighed = "each sample has its own reward", "tokens have the weights of the loss"
    return {
        "prompt ids permuted": (renderer, "prompt_ids", permuted, said),
        "a stale tokenizer in the renderer": (rollouts, "renderer", stale, said),
        "the tokens of the neighbour": (rollouts, "play", neighbours, said),
        "weights times 37": (type(module.algorithm), "weights", lambda *args: learns(*args) * 37, weighed),
        "every other row weighs more": (type(module.algorithm), "weights", uneven, weighed),
        "max_tokens ignored": (engine, "sample", lambda ids, *args: sample(ids, longer(args[0]), *args[1:]),
                               "prompts differ, answers end"),
        "the reward of the neighbour": (task, "score_group", lambda *args: [*(got := score(*args))[1:], got[0]], mixed),
        "the rewards of the next group": (rollouts, "play", one_group_on, mixed),
        "a shifted turn": (probing, "collate", turn_later, "the mask has every sampled token"),
        "a temperature in the update alone": (module, "forward_pass", sharper, "the policy starts at its reference"),
    }  # fmt: skip


def test_no_lie_passes(probe, tmp_path):
    missed = []
    for lie, (owner, name, false, check) in lies(probe, tmp_path).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, false)
            if preflight.outcome(CHECKS[check], again(probe)).result != "FAIL":
                missed.append(lie)
    assert not missed


def test_rewards_that_compare_or_vary_are_no_lie(probe, monkeypatch):
    """A rank among siblings, noise, a reward that needs its environment: alone they are something else, or nothing."""
    rng, check = random.Random(0), CHECKS["each sample has its own reward"]

    def ranks(row, said):
        lengths = [len(one.answer) for one in said]
        return [Reward(float(sum(length < other for other in lengths)), False) for length in lengths]

    for score, reason in [
        (ranks, "rewards compare samples, or vary"),
        (lambda row, said: [Reward(rng.random(), False) for _ in said], "rewards compare samples, or vary"),
        (
            lambda row, said, envs: [Reward(env.score, False) for env in envs],
            "rewards cannot be asked again: AttributeError",
        ),
    ]:
        fresh = again(probe)
        if "cannot" in reason:
            assert len(fresh.samples) > 0  # played with rewards of its own
        monkeypatch.setattr(probe.rollouts.task, "score_group", score)
        found = preflight.outcome(check, fresh)
        assert (found.result, found.compared) == ("SKIP", reason)


class Doors:
    """An environment whose episodes all begin alike: what is behind the door is known only when it is open."""

    def start(self):
        return State((Message("user", "Which door?"),))

    def step(self, action):
        return None


def test_equal_prompts_are_a_fault_of_questions_alone(checked, probe, monkeypatch):
    check, task = CHECKS["prompts differ, answers end"], probe.rollouts.task
    for env, result in ((Doors, "PASS"), (lambda: SingleTurn(Doors().start().messages), "FAIL")):
        monkeypatch.setattr(task, "build", lambda example, env=env: env())
        found = preflight.outcome(check, again(probe))
        assert found.result == result and found.compared.startswith("1 different prompts of 8")
    assert "look at the chat template and at task.prompt" in found.remedy


@pytest.mark.parametrize(
    ("seeded", "equal", "result"), [(True, True, "PASS"), (False, False, "PASS"), (False, True, "FAIL")]
)
def test_a_constant_prompt_needs_a_problem_in_the_row_or_in_the_seed(probe, monkeypatch, seeded, equal, result):
    with_seed, without = (lambda example, group_seed: Doors()), (lambda example: Doors())
    monkeypatch.setattr(probe.rollouts.task, "build", with_seed if seeded else without)
    row = probe.examples["train"][0]
    monkeypatch.setattr(probe.rollouts.sampler, "draw", lambda r, count: [row] * 8 if equal else EXAMPLE_ROWS)
    found = preflight.outcome(CHECKS["prompts differ, answers end"], again(probe))
    assert found.result == result and ("let `build` take group_seed" in found.remedy) == (result == "FAIL")


EXAMPLE_ROWS = [{"question": "Which door?", "answer": str(i)} for i in range(8)]


@pytest.mark.parametrize(
    ("build", "train_rows", "test_rows", "result"),
    [
        (
            lambda example, group_seed: Doors(),
            [{"prompt": "Which door?"}] * 20,
            [{"prompt": "Which door?"}] * 5,
            "PASS",
        ),
        (lambda example: Doors(), [{"prompt": "Which door?"}] * 20, [{"prompt": "Which door?"}] * 5, "FAIL"),
        (lambda example: Doors(), EXAMPLE_ROWS[:5], EXAMPLE_ROWS[5:], "PASS"),  # the answer is the problem
        (lambda example, group_seed: Doors(), EXAMPLE_ROWS[:5], EXAMPLE_ROWS[:2], "FAIL"),  # the row is
        (lambda example, group_seed: SingleTurn(()), [{"prompt": "?"}] * 20, [{"prompt": "?"}] * 5, "FAIL"),
    ],
    ids=["seed", "no seed", "another column", "rows that differ", "a question"],
)
def test_held_out_rows_are_new_where_the_seed_has_the_problem(probe, monkeypatch, build, train_rows, test_rows, result):
    monkeypatch.setattr(probe.rollouts.task, "build", build)
    probe.examples = {"train": train_rows, "test": test_rows}
    assert preflight.outcome(CHECKS["held-out rows are new"], probe).result == result


@pytest.mark.parametrize(
    ("free", "result"), [(10**12, "PASS"), (30_000_000, "WARN"), (3_000_000, "FAIL")], ids=["room", "less", "none"]
)
def test_a_disk_without_room(probe, monkeypatch, tmp_path, free, result):
    """1.26 million weights of 4 bytes and the optimizer's 8: 15 MB a checkpoint, of which three, and three policies of 5 MB."""
    trained = sum(p.nbytes for p in probe.module.policy.parameters())
    checkpoint = Checkpoint(None, str(tmp_path), 20)
    monkeypatch.setattr(probe.module, "trainer", SimpleNamespace(callbacks=[checkpoint]))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(probe, "parts", [Part("optimizer", 2 * trained)])
    found = CHECKS["the disk has room"](probe)
    assert found.result == result and found.compared.startswith(f"the run writes {12 * trained / 1e6:.2f} MB, ")
    assert ("a checkpoint with its policy takes" in found.compared) == (result == "FAIL")


def test_the_room_is_that_of_the_disk_of_the_folder(tmp_path):
    assert disk.free_bytes(tmp_path / "not" / "there") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_a_check_is_named_by_a_part_of_its_name():
    made = preflight.PreflightCallback({"mode": "on", "skip": ["held-out", "disk"]}, None, None, {})
    assert made.waived == {"held-out rows are new", "the disk has room"}
    assert preflight.PreflightCallback("warn", None, None, {}).mode == "warn"  # a file of the user's may say it so
    assert preflight.check_named("prompts differ") == preflight.check_named("prompts differ, answers end")
    with pytest.raises(
        UserError, match=r"skip=\[prompts dffer\] is no check; did you mean 'prompts differ, answers end'"
    ):
        preflight.check_named("prompts dffer")
    with pytest.raises(
        UserError, match=r"in several names: prompts differ, answers end \| prompts have their start token"
    ):
        preflight.check_named("prompts")


@pytest.mark.slow
def test_a_check_that_is_left_out_is_told_everywhere(smoke, tmp_path, capsys):
    """A random model solves nothing; both checks that would stop the run are left out."""
    skip = "preflight.skip=[prompts differ,something to learn]"
    train(compose_config(*smoke("preflight=on", skip, "callbacks=[checkpoint,report]")))
    names = ["prompts differ, answers end", "there is something to learn"]
    verdicts = Run(tmp_path).manifest["preflight"]
    assert [name for name, verdict in verdicts.items() if verdict["result"] == "WAIVED"] == names
    assert f"WAIVED {names[1]}, 0.0 s: by preflight.skip" in capsys.readouterr().out
    assert f"| checks left out | {', '.join(names)} |" in (tmp_path / "checkpoints" / "last" / "README.md").read_text()
    assert "WAIVED: by preflight.skip" in (tmp_path / "report.html").read_text()


class Drawing(L.Callback):
    """Draws before each update."""

    drawn: ClassVar[list[tuple[float, ...]]] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_is_the_same_with_and_without(smoke, tmp_path, monkeypatch, adapter):
    """One check more draws from the generators that others leave alone."""
    monkeypatch.setattr(Drawing, "drawn", [])
    monkeypatch.setitem(CHECKS, "draws", lambda _: ("PASS", f"{random.random()} {np.random.rand()} {torch.rand(1)}"))
    more = f"adapter={adapter} algo/kl=loss +callbacks.drawing._target_=test_preflight.Drawing".split()
    for mode in ("off", "warn"):
        train(compose_config(*smoke(*more, f"preflight={mode}", f"output_dir={tmp_path / mode}")))
    assert rows(tmp_path / "off") == rows(tmp_path / "warn")
    without, with_checks = Drawing.drawn[: len(Drawing.drawn) // 2], Drawing.drawn[len(Drawing.drawn) // 2 :]
    assert without == with_checks and len(without) == len(rows(tmp_path / "off")) - 1
    assert Run(tmp_path / "warn").manifest["preflight"]["draws"]["result"] == "PASS"


@pytest.mark.slow
def test_a_recipe_on_two_layers_with_the_widths_of_its_model(tmp_path):
    """The weights are random, so no answer is right or ends. Every check of the numbers passes, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "wordmath")
    widths = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    shape = Qwen2Config(
        **widths, num_hidden_layers=2, vocab_size=151936, eos_token_id=1, pad_token_id=0, dtype="bfloat16"
    )
    Qwen2ForCausalLM(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    recipe = ["experiment=qwen05b_gsm8k", f"model.path={tmp_path / 'model'}", f"task.path={EXAMPLES}", "preflight=only"]
    recipe += ["trainer=cpu", "model.dtype=float32", "max_tokens=8", "rollout.prompts=2", "rollout.group_size=4"]
    with pytest.raises(PreflightError):
        train(compose_config(*recipe, f"output_dir={tmp_path / 'run'}"))
    found = Run(tmp_path / "run").manifest["preflight"]
    assert {name for name, one in found.items() if one["result"] == "FAIL"} == {
        "prompts differ, answers end",
        "there is something to learn",
    }
    assert found["log-probabilities agree"]["result"] == found["the gradient ignores microbatches"]["result"] == "PASS"


def test_a_failure_stops_the_run_with_an_exit_code_of_its_own(smoke, tmp_path, capsys, monkeypatch):
    """A random model solves nothing."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit) as ended, one_line_errors("train"):
        train(compose_config(*smoke("preflight=on")))
    line = capsys.readouterr().err
    assert ended.value.code == PreflightError.exit_code == 3 and line.count("\n") == 1
    # a busy machine plays two of the four prompts
    assert re.match(
        r"error: preflight failed: prompts differ, answers end: (2|4) different prompts of \1; (4|8) of \2 ", line
    )
    assert "there is something to learn: 0% solved" in line and "(preflight=warn trains all the same, " in line
    manifest = Run(tmp_path).manifest
    assert manifest["status"] == "failed" and manifest["preflight"]["there is something to learn"]["result"] == "FAIL"
    assert not (tmp_path / "metrics.csv").exists()


def test_the_time_of_the_checks_is_a_share_of_the_run():
    assert Allowance(100).seconds == 3  # nothing is known yet
    assert Allowance(10, rollout=4.0, update=6.0).seconds == 10  # a rollout with its update, not 5 % of ten
    known = Allowance(100, rollout=2.0, update=1.0)
    assert known.seconds == pytest.approx(15)  # 5 % of 100 x 3 s
    known.begun -= 9
    assert known.left(1 / 3) == pytest.approx(2, abs=0.1)
    assert known.line({"a": 8.0, "b": 0.5}) == "9.0 s, aimed at 15.0 s"
    known.begun -= 9
    assert known.left() == 0
    assert known.line({"the engine's start": 8.04, "b": 0.5}) == (
        "18.0 s, aimed at 15.0 s; the longest part: the engine's start, 8.0 s"
    )


@pytest.mark.parametrize(("layout", "added"), [("shared_prompt", [5, 1, 4]), ("packed", [5, 4, 4])])
def test_a_shared_prompt_passes_once(layout, added):
    """Two answers, of 2 tokens and of 1, to a prompt of 3, and one of 2 to another of 2."""
    both = [((1, 2, 3), (4, 5)), ((1, 2, 3), (6,)), ((1, 2), (4, 5))]
    turns = [probing.Turn(prompt, Completion(ids, (-1.0,) * len(ids), "stop")) for prompt, ids in both]
    tokens = collate([[Sample({}, Trajectory(()), (turn,), UNKNOWN) for turn in turns]])
    assert added_tokens(tokens, SimpleNamespace(layout=(layout, None))).tolist() == added


def test_the_time_of_an_update_is_that_of_the_tokens_that_pass(probe, monkeypatch):
    """Eight groups of 16 are there, and the answers of one group pass in a second: four times the tokens of 16 groups pass, each
    prompt once. A plan of SmolLM2 had sevenfold times, because it multiplied rows with their prompts."""
    sizes = [len(group[0].turns[0].prompt_ids) + sum(sample.length for sample in group) for group in probe.groups]
    monkeypatch.setitem(probe.module.__dict__, "layout", ("shared_prompt", None))
    probe.compared = probe.tokens.rows(slice(0, 4))
    monkeypatch.setattr(probe, "trainer", lambda tokens: None)
    monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=iter([0.0, 1.0]).__next__))
    assert probe.passed is None
    assert probe.allowance.update == pytest.approx(4 * 16 / 8 * sum(sizes) / sizes[0])


def test_a_slow_machine_keeps_the_time_that_it_aims_at(probe, monkeypatch):
    """A clock that goes with the tokens that pass through the first layer, 20 ms each, and 0.2 s each time; backwards it takes
    twice that. The engine takes 20 ms for each token that it reads or draws."""
    now = [0.0]

    def took(tokens: int, times: int = 1) -> None:
        now[0] += times * (0.2 + 0.02 * tokens)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (probing, allowance, sampling, episodes, learning, preflight):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(sampling, "PATIENCE", 4.0)
    monkeypatch.setattr(episodes, "PATIENCE", 4.0)
    first, engine = probe.module.policy.model.layers[0], probe.rollouts.engine
    hooks = [
        first.register_forward_hook(lambda module, args, out: took(args[0].shape[:-1].numel())),
        first.register_full_backward_hook(lambda module, grads, out: took(out[0].shape[:-1].numel(), 2)),
    ]
    sample = engine.sample

    def sampled(prompts, sampling, seeds, done=None, **named):
        completions = sample(prompts, sampling, seeds, done, **named)
        took(sum(map(len, {*map(tuple, prompts)})) + sum(len(completion.ids) for completion in completions))
        return completions

    monkeypatch.setattr(engine, "sample", sampled)
    slow = Probe(*parts_of(probe), allowance=Allowance(10, begun=0.0))
    try:
        assert failed(slow) == set()
        plan_of(slow, Evaluator(Sampling(8), limit=10, every=0), [], [], timed=True)
    finally:
        for hook in hooks:
            hook.remove()
    whole = slow.allowance.rollout + slow.allowance.update
    assert slow.allowance.seconds == pytest.approx(whole) and whole > 10
    assert now[0] < slow.allowance.seconds


def test_a_rollout_by_the_seconds_of_two_pieces(probe):
    """16 prompts. Two took 4 s and six 6 s: each after the first two takes half a second."""
    few, more = ([[]] * 2, 4.0), ([[]] * 6, 6.0)
    assert probe.rollout_of([few]) == 32.0
    assert probe.rollout_of([few, more]) == 4.0 + 0.5 * 14
    assert probe.rollout_of([few, ([[]] * 6, 3.0)]) == 4.0  # a GPU samples more prompts as quickly


def test_without_time_all_checks_compare_a_little_and_pass(probe):
    short = Probe(*parts_of(probe), allowance=Allowance(80, fixed=0.0))
    assert failed(short) == set()
    assert len(short.groups) == 2 and len(short.compared) == len(short.few) == 3
    assert short.few.ids.shape[1] == 8 and short.few.mask.any(dim=1).all()


def test_the_checks_need_no_more_memory_than_an_update(probe, monkeypatch):
    """At most half of a microbatch goes through the model at once, and layers are recomputed as in an update."""
    again_, most = [], 96
    monkeypatch.setattr(probe.module, "at_once", type(probe.module.at_once)(most))
    monkeypatch.setattr(probe.module, "optim", replace(probe.module.optim, gradient_checkpointing=True))
    recomputing = learning.recomputing
    monkeypatch.setattr(learning, "recomputing", lambda model, on: again_.append(on) or recomputing(model, on))
    longest = int(probe.tokens.attention_mask.sum(1).max())
    assert probe.few.ids.numel() <= max(most, longest) / 2
    assert preflight.outcome(CHECKS["the gradient ignores microbatches"], probe).result == "PASS"
    assert again_ and all(again_)


def test_a_check_that_runs_out_of_memory_is_skipped_with_its_line(probe, monkeypatch):
    def loss(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(type(probe.module.algorithm), "loss", loss)
    found = preflight.outcome(CHECKS["the gradient ignores microbatches"], probe)
    assert found.result == "SKIP" and "Tried to allocate 20.00 GiB" in found.compared
    assert found.remedy.startswith("an update needs more: lower optim.max_tokens_per_microbatch")
    assert all(p.grad is None for p in probe.module.parameters())


def test_draws_that_are_too_thin_or_all_equal_are_skipped_with_the_reason(probe, monkeypatch):
    """100 draws: among 421 tokens alike none is expected five times; one token alone leaves nothing to compare."""
    monkeypatch.setattr(sampling, "MOST_DRAWS", 100)
    for ids, share, reason in [
        (range(100), 1 / 421, "no token of 100 is likely"),
        ([7] * 100, 1.0, "certain everywhere"),
    ]:
        turns = [probing.Turn((5,), Completion((i,), (math.log(share),), "length")) for i in ids]
        monkeypatch.setattr(probe, "sample", lambda *_, turns=turns, **__: probe.rows_of(turns))
        found = preflight.outcome(CHECKS["draws follow the probabilities"], probe)
        assert found.result == "SKIP" and reason in found.compared
