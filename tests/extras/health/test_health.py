"""Warnings: given at the bounds that they name, once, and not again after the run is resumed."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import compose_config
from helpers.runs import rows

from grpo.env.scoring import UNKNOWN
from grpo.env.types import Trajectory
from grpo.evaluation.evaluator import Evaluation
from grpo.evaluation.intervals import mean_interval
from grpo.extras.health.callback import Health, untaught
from grpo.extras.health.watch import warnings_of
from grpo.objectives.trial import even_batch
from grpo.rollout.types import Plan, Sample
from grpo.system.errors import AlarmError, UserError
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.checkpoints import PlainCheckpoints
from grpo.training.meter import Means, note_loss
from tasks.quiz import Quiz
from train import train


def said(
    health: Health, caplog, *values: dict[str, float], evaluations: Sequence[Evaluation] = (), masked: bool = False
) -> list[str]:
    """Return the warnings. A value `long` is the number of truncated ones among 100 samples. masked: algo.mask_truncated."""
    caplog.clear()
    trainer = SimpleNamespace(optimizers=[])
    module = SimpleNamespace(policy=torch.nn.Linear(2, 2), algorithm=SimpleNamespace(mask_truncated=masked))
    for rollout, metrics in enumerate(values):
        long = metrics.pop("long", 0)
        ends = ["truncated"] * long + ["answered"] * (100 - long)
        group = [Sample({}, Trajectory((), end), (), UNKNOWN) for end in ends]
        batch = RolloutBatch(rollout, metrics=metrics, evaluations=list(evaluations), groups=[group])
        health.on_train_batch_end(trainer, module, {}, batch, 0)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("metric", "well", "unwell", "words"),
    [
        ("rollout/logprob_gap", 0.03, 0.031, "old weights"),
        ("rollout/truncated", 0.5, 0.51, "raise max_tokens"),
        ("rollout/timeout", 0.02, 0.021, "teach nothing"),
        ("rollout/error", 0.0, 0.01, "the grader failed"),
        ("rollout/staleness", 1.0, 1.01, "older than rollout.ahead and rollout.max_staleness explain"),
        ("loss/ratio", 1.2, 1.21, "moves far"),
        ("loss/ratio", 0.8, 0.79, "moves far"),
        ("loss/approx_kl", 0.5, 0.51, "has left the one that sampled"),
        ("loss/first_kl", 0.01, 0.011, "before its first step"),
        ("loss/kl", 0.5, 0.51, "algo.kl"),
        ("loss/clip_fraction_high", 0.3, 0.31, "beyond the bound"),
        ("loss/clip_fraction_low", 0.3, 0.31, "beyond the bound"),
    ],
)
def test_a_number_out_of_its_range_is_told_once(metric, well, unwell, words, caplog):
    health = Health()
    assert said(health, caplog, {metric: well}, {}) == []
    (line,) = said(health, caplog, {metric: unwell}, {metric: unwell})
    assert line.startswith(f"rollout 1: {metric} is {unwell:.3g}, ") and words in line
    assert said(health, caplog, {metric: unwell}) == []


def test_a_tiny_model_that_knows_another_task_is_told_before_training(caplog):
    from grpo.extras.demo.demo_model import SHIPPED

    def at(rollout: int, accuracy: float, model: str = str(SHIPPED / "quiz"), task: object = None) -> list[str]:
        health = Health()
        health.foreign = untaught(SimpleNamespace(config=SimpleNamespace(name_or_path=model)), task)
        found = Evaluation(rollout, (), {"accuracy": mean_interval([accuracy] * 2)})
        return said(health, caplog, {}, evaluations=[found])

    (line,) = at(0, 0.0)
    assert line.startswith(
        "rollout 0: no held-out answer is right: model=tiny was trained on tasks.quiz alone: give another"
    )
    assert at(0, 0.5) == at(0, 0.0, model="org/model") == at(0, 0.0, task=Quiz()) == []
    assert not any("model=tiny" in line for line in at(1, 0.0))


def test_groups_without_signal_are_told_when_they_go_on(caplog):
    none, some = {"rollout/effective_groups": 0.0}, {"rollout/effective_groups": 0.1}
    assert said(Health(), caplog, none, none, some, none, none) == []
    assert said(Health(), caplog, none, none, none)[0].startswith(
        "rollout 3: rollout/effective_groups is 0, below 1e-09"
    )


def test_a_divergence_that_rises_vanishes_or_breaks(caplog):
    """It may be three times its start, or 1 nat. An estimate may be below 0, but at 0 itself teacher and policy are one model."""

    def told(*values: float) -> list[str]:
        return said(Health(), caplog, *({"teacher/divergence": value} for value in values))

    assert told(0.1, 0.9, 1.0, 0.99, -0.01) == told(2.0, 5.9, 5.9, 5.9) == told(0.0, 0.0, 0.1, 0.0) == []
    assert "rollout 4: teacher/divergence is 6.1, above 6: " in told(2.0, 6.1, 6.1, 6.1)[0]
    assert "teacher/divergence is 0, below 1e-12: at 0 the teacher is the policy" in told(0.0, 0.0, 0.0)[0]
    assert "teacher/divergence is nan, above " in told(*[float("nan")] * 3)[0]
    with pytest.raises(AlarmError, match="teacher/divergence is inf"):
        told(0.1, float("inf"))


def test_equal_rewards_are_no_news_where_a_teacher_or_a_text_teaches(caplog):
    for more in ("teacher/divergence", "imitation/loss"):
        assert said(Health(), caplog, *[{"rollout/effective_groups": 0.0, more: 0.5}] * 3) == []


def test_old_weights_are_no_news_where_the_rollout_was_played_ahead(caplog):
    def told(gap: float, staleness: float) -> list[str]:
        health = Health()
        health.watch.bound = 3
        return said(health, caplog, {"rollout/logprob_gap": gap, "rollout/staleness": staleness})

    assert told(0.3, 1.0) == []
    assert "is 0.31, above 0.3: engine and trainer disagree" in told(0.31, 1.0)[0]
    assert "is 0.1, above 0.03: engine and trainer disagree" in told(0.1, 0.0)[0]
    assert told(0.75, 2.5) == [] and "is 0.76, above 0.75" in told(0.76, 2.5)[0]  # 0.3 for each version
    assert "is 1.2, above 0.75" in told(1.2, 2.5)[0]  # 1 for each version ends the run
    with pytest.raises(AlarmError, match=r"is 1\.2, above 0\.33"):
        told(1.2, 1.1)


def test_staleness_may_reach_the_bound_of_the_plan(caplog):
    def told(staleness: float, ahead: int) -> list[str]:
        plan = Plan(1, 2, 1, SimpleNamespace(temperature=1.0), ahead=ahead)
        playing = RolloutCallback(SimpleNamespace(plan=plan, engine=None, objects={}, task=None))
        health, resumed, module = Health(), Health(), SimpleNamespace(policy=SimpleNamespace(dtype="float32"))
        health.on_train_start(SimpleNamespace(callbacks=[playing], precision="32"), module)
        resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
        return said(resumed, caplog, {"rollout/staleness": staleness})

    assert told(4.0, 4) == [] and "is 4.1, above 4: the weights that sampled are older" in told(4.1, 4)[0]
    assert told(1.0, 0) == []  # of a source, without rollout.ahead
    (found,) = warnings_of({1: {"rollout/staleness": 2.0}, 2: {"rollout/staleness": 2.1}}, {}, None, bound=2)
    assert (found.rollout, found.metric) == (2, "rollout/staleness")


def test_the_bound_on_log_probabilities_is_that_of_the_preflight(caplog):
    """In float32 it is 1e-5: 10 times that is a warning, 1000 times ends the run. It never exceeds the dictionary's bound."""

    def told(gap: float, rounding: float) -> list[str]:
        health = Health()
        health.watch.rounding = rounding
        return said(health, caplog, {"rollout/logprob_gap": gap})

    assert told(0.9e-4, 1e-5) == [] and "is 0.00011, above 0.0001" in told(1.1e-4, 1e-5)[0]
    with pytest.raises(AlarmError, match=r"is 0\.011, above 0\.0001"):
        told(0.011, 1e-5)
    assert told(0.03, 0.1) == [] and "is 0.9, above 0.03" in told(0.9, 0.1)[0]


def test_a_gradient_that_jumps(caplog):
    """Ten rollouts have the median 2. Rollouts without a gradient do not count."""
    health, usual = Health(), [{"loss/grad_norm": norm} for norm in (1.0, 0.0, *[2.0] * 8, 3.0)]
    assert said(health, caplog, *usual, {"loss/grad_norm": 40.0}) == []
    assert "is 41, above 40: the gradient has jumped" in said(health, caplog, {"loss/grad_norm": 41.0})[0]


def evaluated(rollout: int, right: int) -> Evaluation:
    """An evaluation of a hundred problems."""
    return Evaluation(rollout, (), {"accuracy": mean_interval([1.0] * right + [0.0] * (100 - right), bounds=(0, 1))})


@pytest.mark.parametrize("first", [True, False], ids=["the first is the best", "the second is the best"])
def test_a_held_out_accuracy_that_falls(caplog, first):
    """Wilson's intervals: 80 of 100 is 71.1 to 86.7 %, 69 is 59.4 to 77.2 %, 60 is 50.2 to 69.1 %. The run is resumed."""
    health, resumed = Health(), Health()
    begin = [evaluated(0, 80), evaluated(1, 69)] if first else [evaluated(0, 69), evaluated(1, 80)]
    assert said(health, caplog, begin[1].metrics, evaluations=begin) == []
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    evaluations = [evaluated(2, 69), evaluated(3, 60)]
    assert said(resumed, caplog, evaluations[0].metrics, evaluations=evaluations[:1]) == []
    (line,) = said(resumed, caplog, evaluations[1].metrics, evaluations=evaluations[1:])
    assert "eval/accuracy is 0.6, below 0.711: it is far below its best" in line
    assert said(resumed, caplog, evaluations[1].metrics, evaluations=evaluations[1:]) == []

    each = [*begin, *evaluations]
    intervals = {one.rollout: one.estimates["accuracy"][1:3] for one in each}
    (found,) = warnings_of({one.rollout: one.metrics for one in each}, intervals, None)  # as the report finds it
    assert (found.rollout, found.metric, found.value) == (3, "eval/accuracy", 0.6)


def test_an_accuracy_without_an_interval_is_left_alone(caplog):
    unknown = Evaluation(1, (), {"accuracy": mean_interval([], bounds=(0, 1))})
    single = [Evaluation(at, (), {"accuracy": mean_interval([value])}) for at, value in ((0, 1.0), (2, 0.0))]
    for one in (single[0], unknown, single[1]):
        assert said(Health(), caplog, one.metrics, evaluations=[one]) == []
    assert said(Health(), caplog, single[1].metrics, evaluations=single) == []


@pytest.mark.parametrize(
    ("metric", "well", "unwell", "words"),
    [
        ("rollout/repeated", 0.5, 0.51, "above 0.5: answers mostly repeat themselves"),
        ("loss/entropy", 0.001, 0.0009, "below 0.001: samples hardly differ"),
    ],
)
def test_a_policy_that_collapses_is_reported_after_three_rollouts(metric, well, unwell, words, caplog):
    assert said(Health(), caplog, *[{metric: unwell}] * 2, {metric: well}, *[{metric: unwell}] * 2) == []
    health, resumed = Health(), Health()
    assert said(health, caplog, *[{metric: unwell}] * 2) == []
    resumed.load_state_dict(health.state_dict())
    assert len(said(resumed, caplog, {metric: unwell})) == 1
    (line,) = said(Health(), caplog, *[{metric: unwell}] * 4)
    assert line.startswith(f"rollout 3: {metric} is {unwell:.3g}, {words}")


@pytest.mark.parametrize(
    ("long", "entropy", "masked", "warned"),
    [(6, 0.7, True, True), (5, 0.7, True, False), (6, 0.6, True, False), (6, 0.7, False, False)],
)
def test_filtered_answers_are_news_while_the_entropy_rises(caplog, long, entropy, masked, warned):
    """More than 5 %, and an entropy above 1.5 times the first, 0.4. The run is resumed after one such rollout."""
    health, resumed = Health(), Health()
    begin, later = ({"long": n, "loss/entropy": value} for n, value in ((50, 0.4), (long, entropy)))
    assert said(health, caplog, dict(begin), dict(later), masked=masked) == []
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    found = said(resumed, caplog, dict(later), last := dict(later), masked=masked)
    assert len(found) == warned and last.get("rollout/filtered") == (pytest.approx(long / 100) if masked else None)
    assert all("rollout/filtered is 0.06, above 0.05: ever more answers are too long" in line for line in found)


def test_a_policy_that_a_few_tokens_carry_is_reported(caplog):
    """One token of 20 has the weight 19, and the others 1: 38^2 / (20 x 380) = 0.19."""
    batch = replace(even_batch(1, 20, -3.5), advantages=torch.ones(1, 20))
    logprobs = torch.full((1, 20), -3.5).index_fill(1, torch.tensor([7]), -3.5 + math.log(19.0))

    def update(moved: float) -> dict[str, float]:
        note_loss(means := Means(), batch, -3.5 + moved * (logprobs + 3.5), {"ratio": torch.ones(1, 20)})
        return {name: value for name, value in means.result().items() if name == "loss/effective_samples"}

    assert said(Health(), caplog, *[update(0.2) for _ in range(3)]) == []
    (line,) = said(Health(), caplog, *[update(1.0) for _ in range(3)])
    assert line.startswith("rollout 3: loss/effective_samples is 0.19, below 0.5: a few tokens carry the update")


def test_a_loss_far_below_what_the_advantages_explain(caplog):
    """With a standard deviation of 0.9 the bound is -4.5. A run of an older version has no such number, and no warning."""
    spread = {"rollout/advantages_std": 0.9}
    assert said(Health(), caplog, {"loss/policy": -4.5} | spread, {"loss/policy": -9.0}) == []
    assert "is -4.6, below -4.5: the policy flees" in said(Health(), caplog, {"loss/policy": -4.6} | spread)[0]


def test_answers_that_become_far_longer(caplog):
    health, usual = Health(), [{"rollout/length": length} for length in (*[100.0] * 5, *[120.0] * 5)]
    assert said(health, caplog, *usual, {"rollout/length": 330.0}) == []  # three times the median of 110
    assert "is 361, above 360: answers have become far longer" in said(health, caplog, {"rollout/length": 361.0})[0]
    early = [{"rollout/length": length} for length in (*[100.0] * 9, 900.0)]
    assert said(Health(), caplog, *early) == []  # nine rollouts are too few for a median


@pytest.mark.parametrize(("solved", "reward", "warned"), [(0.3, 1.2, True), (0.4, 1.2, False), (0.3, 0.9, False)])
def test_a_reward_that_rises_while_fewer_answers_are_right(caplog, solved, reward, warned):
    """The best window has 0.5 right at a reward of 1. The run is resumed in between."""
    health, resumed = Health(), Health()
    well, later = ({"rollout/solve_rate": s, "rollout/reward": r} for s, r in ((0.5, 1.0), (solved, reward)))
    assert said(health, caplog, *[well] * 15) == []
    resumed.load_state_dict(health.state_dict())
    found = said(resumed, caplog, *[well] * 5, *[later] * 10)
    assert len(found) == warned and all("is 0.3, below 0.35: fewer answers are right" in line for line in found)


def test_what_was_said_stays_said(caplog):
    health, resumed = Health(), Health(ignore=["loss/ratio"])
    said(health, caplog, {"loss/kl": 9.0})
    resumed.load_state_dict(health.state_dict())
    assert said(resumed, caplog, {"loss/kl": 9.0, "loss/ratio": 9.0}) == []


@pytest.mark.parametrize(
    ("metric", "watched", "stopped"),
    [
        ("rollout/logprob_gap", 0.9, 1.1),
        ("loss/first_kl", 0.9, 1.1),
        ("loss/approx_kl", 9.0, 11.0),
        ("rollout/reward", 1e5, -1e30),
    ],
)
def test_a_number_far_out_of_its_range_stops_the_run(metric, watched, stopped, caplog):
    assert len(said(Health(), caplog, {metric: watched})) == (metric != "rollout/reward")
    with pytest.raises(AlarmError, match=f"rollout 1: {metric} is .*alarms=warn") as alarm:
        said(Health(), caplog, {metric: stopped})
    assert alarm.value.exit_code == 4
    three = [{metric: stopped}] * 3
    assert len(said(Health(alarms="warn"), caplog, *three)) == 1
    assert said(Health(ignore=[metric]), caplog, *three) == []


def test_bounds_of_your_own_take_the_place_of_the_dictionarys(caplog):
    """loss/kl has 0.5, an own part of the reward none. A bound that only ends a run warns of nothing."""
    bounds = {"loss/kl": {"high": 0.1, "after": 2}, "rollout/brief": {"stop": 30}, "eval/accuracy": {"low": 0.4}}
    health = Health(bounds=bounds)
    assert said(health, caplog, {"loss/kl": 0.1, "rollout/brief": 30.0}, {"loss/kl": 0.11}) == []
    (line,) = said(health, caplog, {"loss/kl": 0.11})
    assert line.startswith("rollout 1: loss/kl is 0.11, above 0.1: ")
    (line,) = said(health, caplog, {"eval/accuracy": 0.39})
    assert line.startswith("rollout 1: eval/accuracy is 0.39, below 0.4: ")
    resumed = Health(bounds={"rollout/brief": {"stop": 40}})
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert said(resumed, caplog, {"rollout/brief": 31.0}) == []
    with pytest.raises(AlarmError, match=r"rollout/brief is -31, below -30: a bound of callbacks\.health\.bounds"):
        said(health, caplog, {"rollout/brief": -31.0})
    (found,) = warnings_of({3: {"loss/kl": 0.2}}, {}, None, own={"loss/kl": {"high": 0.1}})
    assert (found.rollout, found.metric, found.stops) == (3, "loss/kl", False)
    for wrong in ({"los/kl": {"high": 1}}, {"loss/kl": {"most": 1}}, {"loss/kl": 3}):
        with pytest.raises(UserError, match=r"callbacks\.health\.bounds="):
            Health(bounds=wrong)


@pytest.mark.parametrize("poisoned", ["model.norm.weight", "exp_avg_sq of parameter 0"])
def test_a_number_that_is_not_finite_never_reaches_a_checkpoint(smoke, tmp_path, poisoned):
    """The step of rollout 2 poisons a weight or the optimizer; the checkpoint of rollout 1 stays the last one."""
    more = ("callbacks=[health,checkpoint]", "callbacks.checkpoint.every=1", "rollout.num_rollouts=3")
    poison = f"+callbacks.poison={{_target_: test_health.Poison, what: {poisoned}}}"
    with pytest.raises(AlarmError, match=f"rollout 2: .* tensors? of policy and optimizer are not finite.* {poisoned}"):
        train(compose_config(*smoke(*more, "callbacks.health.ignore=[rollout/truncated]", poison)))
    saved = PlainCheckpoints().load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert saved["callbacks"]["RolloutCallback"]["rollouts"] == 1
    assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())


class Poison(L.Callback):
    """Poisons a weight or the optimizer's state before the update of rollout 2."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        if module.updates == 1 and self.what.startswith("model"):
            module.policy.model.norm.weight.data[0] = torch.nan
        elif module.updates == 1:
            next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = torch.inf


def test_a_run_that_leaves_truncated_answers_out_has_their_share(smoke, tmp_path):
    """A random model ends no answer."""
    more = ("callbacks=[health,checkpoint]", "callbacks.health.ignore=[rollout/truncated]", "rollout.num_rollouts=1")
    train(compose_config(*smoke(*more, "eval.every=0", "algo.mask_truncated=true")))
    assert rows(tmp_path)[-1]["rollout/filtered"] == 1


def test_filtered_answers_are_compared_with_the_first_entropy_that_is_known(caplog):
    """A first rollout without signal has none."""
    later = [{"long": 50}, {"long": 50, "loss/entropy": 0.4}, *({"long": 6, "loss/entropy": 0.7} for _ in range(3))]
    assert len(said(Health(), caplog, *later, masked=True)) == 1
