"""The dictionary of metrics has what runs log and nothing else, and the table in the docs is made from it."""

import pandas as pd
import pytest
from conftest import EXAMPLES
from helpers.runs import learned

from grpo.env.types import Reward, Trajectory
from grpo.rollout.rollout_metrics import conversation
from grpo.system.errors import UserError
from grpo.system.metrics import (
    GROUPS,
    METRICS,
    TIMES,
    about,
    healthy,
    is_result,
    is_taken,
    metric_table,
    name_of_part,
    require_metric,
    written,
)
from tasks.gsm8k import GSM8K


class Graded(GSM8K):
    """Gives different rewards to the samples of a random model, with parts that are named like metrics of ours."""

    def score(self, example, trajectory) -> Reward:
        value = len(trajectory.answer.encode()) % 7 / 7
        return Reward(
            value, value > 0.5, {"brevity": 2.0, "turns": 7.0, "staleness": 8.0}, "right" if value > 0.5 else "wrong"
        )


def test_every_metric_of_a_run_is_in_the_dictionary_and_every_entry_is_of_some_run(smoke, tmp_path):
    sampling = """eval.samples=4 eval.sampling.temperature=1 selection=dynamic selection.rounds=2
        algo.overlong_share=0.5""".split()
    losses = ("algo/kl=loss", "algo/correction=tis", "algo.entropy.coef=0.01", "algo.off_policy_delta=0.1")
    learned(
        smoke(*sampling, *losses, "algo.num_minibatches=2", "algo.num_epochs=2", "logger=csv"),
        {"_target_": "test_metric_dictionary.Graded", "path": str(EXAMPLES)},
    )
    logged = pd.read_csv(tmp_path / "metrics.csv", index_col="step")
    parts = {
        f"{first}/{name}" for first in ("rollout", "eval") for name in ("brevity", "reward/turns", "reward/staleness")
    }
    assert {name for name in logged if about(name).name in ("rollout/NAME", "eval/NAME")} == parts
    assert not [name for name in logged if about(name).name == "loss/NAME"]

    elsewhere = {
        f"{first}/{name}" for first in ("rollout", "eval") for name in (*conversation(Trajectory(())), "samples")
    }
    elsewhere |= {
        "rollout/staleness",
        "rollout/staleness_max",
        *(f"rollout/{kind}_groups" for kind in ("buffered", "flying", "resampled", "stale", "replayed")),
        "data/asked",
        "data/drawable",
        *(f"time/{kind}" for kind in ("played", "engine_idle", "weights")),
        "loss/NAME",
        "loss/scale",
        "loss/overflowed",
    }  # rollout.ahead, replay, samplers, comparisons, a user's surrogate, float16
    elsewhere |= {"value/explained_variance", "value/mean", "value/grad_norm", "loss/value"}  # a critic
    elsewhere |= {"teacher/divergence", "teacher/NAME/divergence", "teacher/rows", "time/teacher"}
    elsewhere |= {"imitation/loss", "imitation/held_out", "imitation/found", "rollout/filtered"}
    assert {name for name in logged if "epoch_" in name} == {"loss/policy_epoch_1", "loss/policy_epoch_2"}
    entries = {metric.name for metric in METRICS if not metric.part}
    assert entries - {about(name).name for name in logged} == elsewhere
    assert (logged["rollout/reward/turns"].dropna() == 7).all() and (logged["eval/reward/turns"].dropna() == 7).all()


def test_the_table_has_every_metric():
    assert all(f"`{metric.name}`" in metric_table() for metric in METRICS)
    assert "| `rollout/timeout` `eval/timeout` | share |" in metric_table() and "| at most 0.02 |" in metric_table()


def test_ranges_are_read_once():
    """A bound that only ends a run is no range of healthy runs."""
    told = {name: healthy(about(name)) for name in ("rollout/reward", "rollout/effective_groups", "loss/first_kl")}
    assert told == {
        "rollout/reward": "",
        "rollout/effective_groups": "above 0; a warning comes after 3 rollouts outside",
        "loss/first_kl": "at most 0.01, with samples of older weights 0.5 for each version",
    }
    assert "| at most 0.05 | above 0.5 |" in metric_table()  # eval/judge_invalid


def test_names_are_told_apart_and_a_sentence_each():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and all(metric.words.endswith(".") for metric in METRICS)
    assert all(metric.low <= metric.high for metric in METRICS)
    assert set(TIMES) == {"time/rollout", "time/update", "time/sync", "time/eval"}
    drawn = [metric.name for metric in GROUPS["Reward and accuracy"] if metric.charted]
    assert drawn == ["eval/accuracy", "rollout/reward", "rollout/solve_rate", "rollout/effective_groups"]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("eval/pass@16", "eval/pass@K"),
        ("eval/pass^2", "eval/pass^K"),
        ("rollout/gsm8k/format", "rollout/format"),
        ("eval/words/level_5", "eval/level_K"),
        ("rollout/format_std", "rollout/NAME_std"),
        ("eval/brevity", "eval/NAME"),
        ("eval/truncated/x", "eval/NAME"),
        ("eval/math/pass@8", "eval/pass@K"),  # of one of eval.sets
        ("eval/reward/length", "eval/NAME"),
        ("loss/mine", "loss/NAME"),
    ],
)
def test_families_of_names(name, entry):
    assert about(name).name == entry


def test_a_name_of_no_metric():
    assert about("epoch") is None
    require_metric("key", "eval/brevity")  # it may be a part of the reward
    require_metric("key", "eval/brevity", ["loss/kl", "eval/brevity"])
    require_metric("key", "eval/brevity", ["loss/kl"])  # nothing was evaluated yet
    for name, measured, line in [
        ("epoch", (), "key=epoch is no metric; similar: data/epoch, "),
        (
            "eval/brevety",
            ["eval/accuracy", "eval/brevity", "loss/kl"],
            "of this run; similar: eval/brevity, eval/accuracy;",
        ),
    ]:
        with pytest.raises(UserError, match=line):
            require_metric("key", name, measured)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(
            (name, f"reward/{name}")
            for name in ("turns", "env_error", "staleness", "old_logprobs", "tool_calls", "accuracy")
        ),
        *(
            (name, f"reward/{name}")
            for name in "advantages repeated reward pass@2 brevity_std rounds logprob_gap_max samples".split()
        ),
        *(
            (name, name)
            for name in ("brevity", "correct", "format", "level_3", "gsm8k/reward", "overlong", "reward/form")
        ),
        ("reward/turns", "reward/reward/turns"),  # otherwise two parts would share a name
    ],
)
def test_a_part_of_the_reward_leaves_our_metrics_alone(part, name):
    assert name_of_part(part) == name


def test_values_as_people_read_them():
    assert [written("eval/accuracy", 0.125), written("eval/length", 1234.56)] == ["12.5 %", "1235"]
    assert [written("eval/gsm8k/correct", 1.0), written("eval/brevity", 0.5)] == ["100.0 %", "0.5"]
    assert [written("eval/accuracy", None), written("eval/accuracy", float("nan"))] == ["-", "-"]
    assert is_result("eval/length", 8.0) and not is_result("time/eval", 8.0)
    assert is_result("eval/timeout", 0.1) and not is_result("eval/timeout", 0.0) and is_result("eval/truncated", 0.0)
    assert is_taken("length") and not is_taken("brevity")
