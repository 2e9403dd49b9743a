"""Ideas of a day, as the pages write them."""

import re
from dataclasses import fields
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import ROOT, compose_config
from helpers.documents import blocks
from helpers.episodes import said
from hydra.utils import instantiate
from torch.optim.lr_scheduler import LambdaLR

from grpo.apps.api import split
from grpo.env.types import Reward
from grpo.extras.selection.samplers import Weighted
from grpo.objectives.batch import Scores
from grpo.rollout.samples_table import golds, records, replayable, token_logprobs
from grpo.rollout.types import Sample
from grpo.system.errors import AlarmError
from grpo.system.progress import Progress, set_progress
from grpo.training.batch import RolloutBatch
from train import train


def of_page(page: str, name: str) -> type:
    """Return what a block of a page defines."""
    (source,) = [text for text in blocks(ROOT / "docs" / f"{page}.md", "python") if f" {name}(" in text]
    namespace = {"L": L}
    exec(source, namespace)
    return namespace[name]


def named_in(page: str, head: str) -> set[str]:
    """Return the names in the first column of a table."""
    rows = (ROOT / "docs" / f"{page}.md").read_text().partition(f"{head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall("`(.+?)`", row.split("|")[1])}


def test_the_tables_of_the_pages_have_the_fields_of_a_batch_and_the_columns_of_a_sample():
    assert named_in("objectives", "| field of `batch`") == {field.name for field in fields(RolloutBatch)}
    assert named_in("objectives", "| field of `batch.scores`") == {field.name for field in fields(Scores)}
    groups = [[Sample({"question": "?"}, said("a"), (), Reward(0.0, False, {"NAME": 0.0}, extra={"NAME": 0}), age=1)]]
    more = golds(None, groups) | token_logprobs(groups) | replayable(groups, 0)
    (row,) = records(groups, **more)
    of_others = {
        "rollout",
        "advantage",
        "overlong",
        "divergence",
        "answer",
        "correct_lenient",
        "by/NAME",
        "set",
        "eval/NAME",
    }
    assert (
        named_in("python", "| column") == row.keys() | of_others
        and row["prompt"] == said("a").steps[0].state.messages[-1].content
    )


def test_the_plateau_halves_the_learning_rate_of_the_updates_that_follow():
    """Accuracies .5, .6, .6, .6, .7: the third and fourth are not the best, so the rate is halved once, after the fourth."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    schedule, plateau, rates = LambdaLR(optimizer, lambda step: 1.0), of_page("objectives", "Plateau")(), []
    module = SimpleNamespace(lr_schedulers=lambda: schedule)
    for accuracy in (0.5, 0.6, 0.6, None, 0.6, 0.7):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        evaluated = [] if accuracy is None else [SimpleNamespace(metrics={"eval/accuracy": accuracy})]
        plateau.on_train_batch_end(None, module, {}, SimpleNamespace(evaluations=evaluated), 0)
    assert rates == [0.8, 0.8, 0.8, 0.8, 0.8, 0.4]


def test_the_coefficient_of_the_kl_rises_with_the_run():
    """To 0.1: it is 0.05 in the middle, in an objective that is else the same."""
    algorithm = instantiate(compose_config("algo/kl=loss", "output_dir=.").algo)
    module, rising = SimpleNamespace(algorithm=algorithm), of_page("objectives", "Rising")(to=0.1)
    rising.on_train_batch_start(None, module, RolloutBatch(5, Progress(5, 10)), 0)
    assert module.algorithm.kl.coef == pytest.approx(0.05)
    assert module.algorithm.surrogate is algorithm.surrogate and algorithm.kl.coef != module.algorithm.kl.coef


def test_the_curriculum_goes_from_one_source_to_the_other(tmp_path):
    """At the share 0 it is all of the first, at 1 none; a file's function is taken by its name."""
    (source,) = [text for text in blocks(ROOT / "docs" / "objectives.md", "python") if "def moving" in text]
    (tmp_path / "curriculum.py").write_text(source)
    rows = [{"question": str(i), "source": "gsm8k" if i % 2 else "math"} for i in range(4)]
    sampler = Weighted(rows, 2, 0, f"{tmp_path}/curriculum.py:moving")
    for rollout, wanted in ((0, [0.1, 1.0, 0.1, 1.0]), (5, [0.6, 0.5, 0.6, 0.5])):
        set_progress(rollout, 10)
        assert sampler.weights().round(6).tolist() == wanted


def test_what_an_object_is_chosen_with_comes_before_what_is_typed():
    function = Reward
    assert split({"sampler.weight": function})[0] == ["sampler=weighted"]
    assert split({"sampler": "signal", "sampler.weight": function})[0] == ["sampler=weighted", "sampler=signal"]
    assert split({"optim.optimizer": "muon"})[0] == ["optim=muon"]


def test_the_likelihood_of_an_answer_is_minus_the_loss_of_its_tokens():
    """transformers' own loss, of labels that leave the question out."""
    likely = of_page("rewards", "likely")
    names = likely.__wrapped__.__globals__
    model, read = names["MODEL"], names["TOKENIZER"].encode
    prompt, answer = read("Ben has 4 shells."), read("4+7=11")
    ids = torch.tensor([prompt + answer])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
    (value,) = likely(["Ben has 4 shells."], [answer])
    assert value == pytest.approx(-model(ids, labels=labels).loss.item(), rel=1e-5) and value < -0.1


def test_an_own_alarm_ends_the_run_with_exit_code_4_and_without_a_checkpoint(smoke, tmp_path, monkeypatch):
    """At most 8 tokens are sampled, and 9 are asked for. Any letter makes an answer right."""
    (source,) = [text for text in blocks(ROOT / "docs" / "preflight.md", "python") if "AlarmError" in text]
    (tmp_path / "alarms.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = "+callbacks.cheap={_target_: alarms.Cheap, least: 9}"
    words = "callbacks=checkpoint", "callbacks.checkpoint.every=1", "task.rewards=unique_letters", "eval.every=0", own
    with pytest.raises(AlarmError, match="rollout 1: right answers have") as alarm:
        train(compose_config(*smoke(*words)))
    assert alarm.value.exit_code == 4 and not any((tmp_path / "checkpoints").glob("*.ckpt"))
