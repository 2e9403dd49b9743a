"""Groups that others have played: rows become samples, mistakes in them one line, and a recorded run is replayed to the bit."""

import json
import math

import pytest
import torch
from conftest import preset

import grpo
from grpo.env.tokens import Completion, rows_of_turns
from grpo.extras.sources.conversion import Conversion
from grpo.extras.sources.file import Recorded, row_of_a_run
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate, scores
from grpo.rollout.rollout_metrics import rollout_metrics
from grpo.rollout.samples_table import replayable
from grpo.system.errors import RolloutError, UserError

ROW = {"ids": [1, 5, 6, 7, 8, 9, 10], "sampled": [0, 0, 1, 1, 0, 1, 1], "logprobs": [0, 0, -0.1, -0.2, 0, -0.3, -0.4]}


def given(row=None, **more):
    return {"rows": [{**ROW, **(row or {})}], "reward": 1.0, "group": 0, **more}


@pytest.fixture
def convert(toy):
    pretrained = Pretrained(str(toy))
    return Conversion(pretrained, TokenizerRenderer(pretrained.tokenizer()))


def one(convert, sample):
    [[found]] = convert.groups([("here", sample)])
    return found


def test_a_run_of_sampled_tokens_is_a_turn_and_the_row_comes_back(convert, caplog):
    sample = one(convert, given(finish="stop"))
    first, second = sample.turns
    assert first.prompt_ids == (1, 5) and first.completion == Completion((6, 7), (-0.1, -0.2), "stop")
    assert second.prompt_ids == (1, 5, 6, 7, 8) and second.completion == Completion((9, 10), (-0.3, -0.4), "stop")
    [row] = rows_of_turns(sample.turns)
    assert row.prompt_ids + row.ids == tuple(ROW["ids"]) and row.sampled == (True, True, False, True, True)
    assert len(sample.trajectory.steps) == 2 and not sample.trajectory.truncated and sample.reward.correct
    assert sample.reward.extra == {"versions": "unknown"} and "which weights have sampled is unknown" in caplog.text
    assert (
        not one(convert, given(reward=-1.0)).reward.correct
        and one(convert, given(reward=-1.0, correct=True)).reward.correct
    )
    assert math.isnan(one(convert, given(reward=None)).reward.value)


def test_the_end_is_an_end_token_or_a_guess(convert, caplog):
    end = min(convert.ends)
    assert not one(convert, given({"ids": [*ROW["ids"][:-1], end]})).trajectory.truncated and not caplog.text.count(
        "no end"
    )
    guessed = one(convert, given({"versions": [3] * 7}))
    assert guessed.trajectory.truncated and guessed.reward.extra == {"versions": [3], "finish": "guessed"}
    assert one(convert, given()).trajectory.truncated and caplog.text.count("no end token and no finish reason") == 1
    cut = one(convert, given(finish="length"))
    assert cut.reward.extra == {"versions": "unknown"}
    assert [turn.completion.finish for turn in cut.turns] == ["stop", "length"]  # the first was answered


def test_a_recorded_sample_keeps_how_it_ended(convert):
    row = {"rows": [ROW], "prompt_index": 0, "given_advantage": None, "reward": 1.0, "correct": True}
    for truncated in (False, True):
        assert one(convert, row_of_a_run(row | {"truncated": truncated}, 0)).trajectory.truncated == truncated


def test_advantages_of_sample_and_tokens(convert, caplog):
    assert one(convert, given(advantage=0.0)).reward.advantage == 0
    assert one(convert, given({"advantages": [9, 9, 2.0, 2.0, 9, 2.0, 2.0]})).reward.advantage == 2
    differ = one(convert, given({"advantages": [9, 9, 1.0, 2.0, 9, 3.0, 4.0]}))
    assert [turn.advantages for turn in differ.turns] == [(1, 2), (3, 4)] and math.isnan(differ.reward.advantage)
    assert collate([[differ]]).given.nan_to_num(9).tolist() == [[1, 2, 9, 3, 4]]
    assert math.isnan(one(convert, given()).reward.advantage)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"logprobs": [0.0] * 6}, "here: the lists of a row must be equally long, not {'ids': 7, 'sampled': 7, 'logprobs': 6}"),
        ({"ids": [1, 5, 6, 7, 8, 9, 10**6]}, "here: 1000000 is no token of the model"),
        ({"ids": [1, 5, 6, 7, 8, 9, -1]}, "here: -1 is no token of the model, which has 0 to "),
        ({"sampled": [0] * 7}, "here: the mask has 0 of 7 tokens as sampled"),
        ({"sampled": [1] * 7}, "here: the mask has 7 of 7 tokens as sampled: a row begins with a prompt"),
        ({"logprobs": [1.0] * 7}, "here: 1.0 is no log-probability of a sampled token, which is at most 0"),
        ({"sampled": [0, 1, 1, 1, 1, 1, 1], "logprobs": [-0.5] * 7}, "all 6 sampled tokens have the log-probability -0.5"),
        ({"logprobs": None}, "here: there are no log-probabilities of the engine, which the loss needs: let the environment"),
        ({"tokens": []}, "here: this is no sample, TypeError: .*tokens"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(convert, change, line):
    with pytest.raises(RolloutError, match=line):
        convert.groups([("here", given(change))])


def test_a_sample_may_bring_its_temperature(convert, toy):
    """For all of its tokens, or in each row for each token; a recorded sample comes back with it."""
    whole = one(convert, given(temperature=0.7))
    assert [turn.completion.temperature for turn in whole.turns] == [0.7, 0.7]
    parts = one(convert, given({"temperatures": [None, None, 0.5, 0.5, None, None, None]}))
    assert [turn.completion.temperature for turn in parts.turns] == [0.5, None]
    assert collate([[whole]]).temperature.tolist() == [pytest.approx([0.7, 0.7, 0, 0.7, 0.7])]
    assert collate([[parts]]).temperature.tolist() == [[0.5, 0.5, 0, 0, 0]]
    assert collate([[one(convert, given())]]).temperature is None
    [[[row]]] = replayable([[parts]], 0)["rows"]
    assert row["temperatures"] == [None, None, 0.5, 0.5, None, None, None]
    for wrong in (0, -1.0, "0.7"):
        with pytest.raises(
            RolloutError, match=f"here: temperature {wrong}: a sample to learn from has a temperature above 0"
        ):
            convert.groups([("here", given(temperature=wrong))])


def test_groups_of_unequal_size_are_a_rectangle_with_unknown_rewards(convert):
    many = [
        given(reward=r, group=g, finish="stop", parts={"f": r})
        for g, r in ((0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0), (1, 0.0))
    ]
    groups = convert.groups(("here", json.dumps(sample)) for sample in many)
    assert [len(group) for group in groups] == [3, 2]
    found = scores(groups)
    assert (
        found.rewards[0].tolist() == [1, 0, 0]
        and found.rewards[1, :2].tolist() == [1, 0]
        and found.rewards[1, 2].isnan()
    )
    assert (
        found.lengths.tolist() == [[4, 4, 4], [4, 4, 0]]
        and not found.truncated.any()
        and found.parts["f"][1, 2].isnan()
    )
    tokens = collate(groups, [0, 3])
    assert tokens.sample.tolist() == [0, 1, 2, 3, 4]
    algorithm = preset("algo=dr_grpo")
    credited = algorithm.credit(algorithm.shaped(found), tokens)
    means = credited.sample_means(credited.advantages, (2, 3))
    assert torch.allclose(means, torch.tensor([[2 / 3, -1 / 3, -1 / 3], [0.5, -0.5, 0.0]]))
    metrics = rollout_metrics(groups, found)
    assert metrics["rollout/tokens"] == 20 and metrics["rollout/solve_rate"] == 0.4 and metrics["rollout/turns"] == 2


def test_a_file_of_groups_is_read_on_and_begins_again(toy, tmp_path):
    file = tmp_path / "samples.jsonl"
    lines = [given(group=f"{g}\u2028", reward=float(g), finish="stop") for g in range(3)]  # it ends no line of JSON
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    pretrained = Pretrained(str(toy))
    source = Recorded(pretrained, TokenizerRenderer(pretrained.tokenizer()), str(file))
    assert [[group[0].reward.value for group in source.groups(r, 2, 0, None)] for r in range(3)] == [
        [0, 1],
        [2, 0],
        [1, 2],
    ]
    assert source.groups(0, 2, 2, None) == []  # no second round
    later = Recorded(pretrained, TokenizerRenderer(pretrained.tokenizer()), str(file), first=2)
    assert [group[0].reward.value for group in later.groups(0, 2, 0, None)] == [2, 0]


@pytest.fixture(scope="module")
def recorded(toy, tmp_path_factory):
    """A run of two rollouts that has kept its tokens, and its settings."""
    settings = {
        "rollout": {"prompts": 2, "group_size": 3, "num_rollouts": 2}, "max_tokens": 8, "preflight": "off", "forecast": False,
        "callbacks": ["samples"], "callbacks.samples.token_logprobs": True, "optimizer": {"lr": 1e-2}, "engine": "transformers",
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("recorded") / "run"
    more = {"task.rewards": ["tests/extras/sources/test_sources.py:early"], "eval": {"every": 0}}
    return grpo.train(str(toy), task="wordmath", output_dir=folder, **settings, **more), settings


def early(completions, **kwargs):
    """Reward texts that sort early."""
    return [1.0 / (1 + ord(text[0]) if text else 2) for text in completions]


@pytest.mark.slow
def test_the_replay_of_a_run_learns_the_same_to_the_bit(toy, recorded, tmp_path):
    run, settings = recorded
    again = grpo.train(
        str(toy), source="file", output_dir=tmp_path / "again", **settings, **{"source.path": run.folder}
    )
    before, first, now = Pretrained(str(toy)).model().state_dict(), run.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(weight, now[name]) for name, weight in first.items())
    assert not all(torch.equal(weight, before[name]) for name, weight in first.items())
    learned = [
        name
        for name in run.metrics
        if name.startswith(("loss/", "rollout/reward", "rollout/length", "rollout/logprob"))
    ]
    assert len(learned) > 10 and all(run.metrics[name].equals(again.metrics[name]) for name in learned)
    assert again.samples([1])["completion"].tolist() == run.samples([1])["completion"].tolist()
    second = settings | {"rollout": settings["rollout"] | {"num_rollouts": 1}, "alarms": "warn"}
    chosen = {"source.path": run.folder, "source.first": 2}
    alone = grpo.train(str(toy), source="file", output_dir=tmp_path / "second", **second, **chosen)
    assert alone.samples([1])["completion"].tolist() == run.samples([2])["completion"].tolist()
    assert {*alone.samples([1])["extra/versions"]} == {"[0]"}  # as fresh as they were
    with pytest.raises(UserError, match=r"2 recorded rollouts, not 3: lower source\.first or rollout\.num_rollouts"):
        grpo.train(str(toy), source="file", output_dir=tmp_path / "past", **settings, **chosen)
    longer = settings | {"rollout": settings["rollout"] | {"num_rollouts": 3}}
    with pytest.raises(UserError, match=r"has 2 recorded rollouts, not 3: lower rollout\.num_rollouts"):
        grpo.train(str(toy), source="file", output_dir=tmp_path / "more", **longer, **{"source.path": run.folder})


@pytest.mark.slow
def test_a_file_gives_its_groups_in_order_and_again(toy, recorded, tmp_path):
    file = tmp_path / "samples.jsonl"
    lines = [given(group=g, reward=r, finish="stop") for g in range(3) for r in (0.0, 1.0, 1.0)]
    file.write_text("\n".join(map(json.dumps, lines[:-1])) + "\n\n")
    settings = recorded[1] | {"source.path": file, "alarms": "warn"}
    run = grpo.train(str(toy), source="file", output_dir=tmp_path / "run", **settings)
    assert [len(run.samples([r])) for r in (1, 2)] == [6, 5]  # groups 0 and 1, then 2, which has two samples, and 0
    assert run.samples([2])["advantage"].round(2).tolist() == [-0.71, 0.71, -1.15, 0.58, 0.58]
    with pytest.raises(SystemExit):  # there is nothing to check, and nothing is learned either
        grpo.train(str(toy), source="file", output_dir=tmp_path / "only", **settings | {"preflight": "only"})
    for text, line in (
        ("", "has no samples: give a run with"),
        ("{", "line 1: this is no sample"),
        ("[]", "line 1: this is no"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=line):
            grpo.train(str(toy), source="file", output_dir=tmp_path / "bad", **settings)


def test_a_run_without_a_task_needs_a_source(toy, tmp_path):
    with pytest.raises(
        UserError, match="task=none is for samples that others play: give a task, or source=atropos or file"
    ):
        grpo.train(str(toy), task="none", output_dir=tmp_path)
