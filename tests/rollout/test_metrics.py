"""Episodes: single-use environments in parallel, several turns, seeds, metrics; evaluation on top of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import EXAMPLES, compose_config, seed

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.evaluation.evaluator import Evaluator
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import scores
from grpo.rollout.engine_queue import EngineQueue
from grpo.rollout.episodes import play
from grpo.rollout.rollout_metrics import rollout_metrics, sample_means, share_repeated
from grpo.rollout.types import Plan, Sample
from grpo.system.errors import UserError
from grpo.system.seeds import derive_seed
from tasks.gsm8k import GSM8K
from train import train


class Counting:
    """An environment of `turns` turns, which fits the Protocol without importing anything of ours but `Message`."""

    built = 0

    def __init__(self, turns: int, name: str) -> None:
        type(self).built += 1
        self.left, self.name, self.heard = turns, name, []

    def start(self):
        return SimpleNamespace(messages=(Message("user", self.name),))

    def step(self, action):
        self.heard.append(action.message)
        self.left -= 1
        if self.left == 0:
            return None
        turns = [m for said in self.heard for m in (said, Message("user", "and then?"))]
        return SimpleNamespace(messages=(Message("user", self.name), *turns))


class CountingTask:
    def build(self, example):
        return Counting(*example)

    def score(self, example, trajectory):
        return Reward(len(trajectory.steps), correct=False)


def test_every_sample_has_an_environment_of_its_own_and_turns_go_on_as_long_as_it_says(parts):
    Counting.built = 0
    groups = play(CountingTask(), [(1, "a"), (3, "b"), (2, "c")], 2, *parts, Sampling(4), seed)
    assert Counting.built == 6
    assert [[len(sample.turns) for sample in group] for group in groups] == [[1, 1], [3, 3], [2, 2]]
    assert [[sample.reward.value for sample in group] for group in groups] == [[1, 1], [3, 3], [2, 2]]
    assert [group[0].trajectory.steps[0].state.messages[0].content for group in groups] == ["a", "b", "c"]
    for group in groups:
        for sample in group:
            said = [step.action.message for step in sample.trajectory.steps]
            assert list(sample.trajectory.steps[-1].state.messages[1::2]) == said[:-1]  # its own words, no other's
    scored = scores(groups)
    assert scored.lengths[1].tolist() == [sum(len(t.completion.ids) for t in sample.turns) for sample in groups[1]]
    assert scored.last_lengths[1].tolist() == [len(sample.turns[-1].completion.ids) for sample in groups[1]]


def test_what_a_sample_says_depends_on_its_own_seed_only(parts):
    examples = [(1, "a"), (2, "b")]
    both = play(CountingTask(), examples, 3, *parts, Sampling(6), seed)
    alone = play(CountingTask(), examples[:1], 2, *parts, Sampling(6), seed)
    ids = [[sample.turns[0].completion.ids for sample in group] for group in (both[0][:2], alone[0])]
    assert ids[0] == ids[1]
    assert len({sample.turns[0].completion.ids for sample in both[0]}) == 3
    assert len({derive_seed(0, p, s, t) for p in range(20) for s in range(20) for t in range(3)}) == 1200


def test_a_state_may_lower_the_limit_of_its_message_and_not_raise_it(parts):
    queue = EngineQueue(parts[0], Sampling(8), None, [])
    assert [queue.sampling_in(State((), max_tokens=n), parts[1]).max_tokens for n in (3, 20, None)] == [3, 8, 8]


def test_evaluator_plays_the_first_test_rows(parts):
    evaluation = Evaluator(Sampling(4, temperature=0.0), limit=2)(GSM8K(str(EXAMPLES)), *parts, seed=0, rollout=3)
    rows = GSM8K(str(EXAMPLES)).examples("test")
    assert [group[0].example for group in evaluation.groups] == [rows[0], rows[1]]
    assert (evaluation.rollout, evaluation.metrics["eval/accuracy"], evaluation.metrics["eval/length"]) == (3, 0.0, 4.0)


@pytest.mark.parametrize("wrong", [{"prompts": 0}, {"group_size": 0}, {"num_rollouts": 0}])
def test_plans_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Plan(**{"prompts": 2, "group_size": 2, "num_rollouts": 1, "sampling": Sampling(1)} | wrong)


def test_a_renderer_without_template_reads_plain_text_and_a_prefill_is_continued(toy):
    tokenizer = Pretrained(str(toy)).tokenizer()
    renderer = TemplateRenderer(tokenizer)
    question, prefill = Message("user", "2 + 2?"), Message("assistant", "It is")
    asked, continued = (tokenizer.decode(renderer.prompt_ids(m)) for m in ([question], [question, prefill]))
    assert asked == "<|user|>2 + 2?<|end|><|assistant|>" and continued == asked + "It is"
    assert renderer.parse(tokenizer("four<|end|>").input_ids) == Message("assistant", "four")
    tokenizer.chat_template = None
    assert tokenizer.decode(renderer.prompt_ids([question])) == "2 + 2?"


def test_weights_are_loaded_once_a_version(smoke, tmp_path, monkeypatch):
    """Evaluations at the start, in the middle and at the end cause no extra load; no rollout samples with old weights."""
    loads, sampled = [], []
    load, sample = TransformersEngine.load_weights, TransformersEngine.sample
    monkeypatch.setattr(
        TransformersEngine,
        "load_weights",
        lambda self, model, version: (loads.append(version), load(self, model, version)),
    )
    monkeypatch.setattr(
        TransformersEngine, "sample", lambda self, *args: (sampled.append(self.version), sample(self, *args))[1]
    )
    train(compose_config(*smoke("rollout.num_rollouts=3", "eval.every=2")))
    assert loads == [0, 1, 2, 3]
    assert sampled == [0, 0, 1, 2, 2, 3]  # evaluation, rollout, rollout, evaluation, rollout, evaluation


def graded(value: float, correct: bool, parts: dict[str, float], outcome: str | None = None) -> Sample:
    step = Step(State((Message("user", "q"),)), Action(Message("assistant", "a")))
    turn = Turn((1,), Completion((2, 3), (-1.0, -1.0), "stop"))
    return Sample({}, Trajectory((step,)), (turn,), Reward(value, correct, parts, outcome))


def test_a_grader_that_fails_is_counted_and_spoils_no_mean():
    """Two right, one wrong, one unknown, whose part says that the grader timed out."""
    right, wrong = graded(1.0, True, {"timeout": 0.0}), graded(0.0, False, {"timeout": 0.0})
    groups = [[right, wrong], [right, graded(math.nan, False, {"timeout": 1.0})]]
    got = rollout_metrics(groups, scores(groups))
    assert got["rollout/reward/timeout"] == 0.25 and got["rollout/solve_rate"] == pytest.approx(2 / 3)
    assert got["rollout/reward"] == pytest.approx(2 / 3) and got["rollout/reward_std"] == pytest.approx(
        math.sqrt(2) / 3
    )
    assert got["rollout/effective_groups"] == 0.5 and got["rollout/tokens"] == 8.0
    groups.append([right, wrong])
    assert rollout_metrics(groups, scores(groups))["rollout/effective_groups"] == pytest.approx(2 / 3)


def test_answers_that_repeat_themselves():
    """The runs of four are 1234 2341 3412 4123 1234, and 7777 three times: 1 and 2 of them came before."""

    def said(*turns: tuple[int, ...]) -> Sample:
        given = tuple(Turn((0,), Completion(ids, (-1.0,) * len(ids), "stop")) for ids in turns)
        return replace(graded(1.0, True, {}), turns=given)

    samples = [said((1, 2, 3, 4, 1, 2, 3, 4)), said((7,) * 6), said((1, 2, 3)), said((1, 2, 3, 4), (1, 2, 3, 4))]
    assert [share_repeated(sample) for sample in samples] == pytest.approx([1 / 5, 2 / 3, 0, 0])
    assert sample_means(samples)["repeated"] == pytest.approx((1 / 5 + 2 / 3) / 4)


def test_parts_that_are_called_like_our_metrics_are_logged_beside_them():
    parts = {"length": 9.0, "timeout": 7.0, "reward": 5.0, "turns": 3.0, "correct": 2.0, "brevity": 1.0}
    other = {name: value + 2 for name, value in parts.items()}  # so each has mean + 1 and standard deviation 1
    groups = [[graded(1.0, True, parts, "right"), graded(0.5, False, other, "timeout")]]
    got = rollout_metrics(groups, scores(groups))
    beside = {f"reward/{name}": parts[name] for name in ("length", "timeout", "reward", "turns")}
    for name, value in {**beside, "correct": 2.0, "brevity": 1.0}.items():
        assert (got[f"rollout/{name}"], got[f"rollout/{name}_std"]) == (value + 1, 1.0), name
    ours = {"length": 2.0, "timeout": 0.5, "reward": 0.75, "reward_std": 0.25, "solve_rate": 0.5}
    assert {name: got[f"rollout/{name}"] for name in ours} == ours
    assert "rollout/turns" not in got  # one turn, no tools

    means = sample_means(groups[0])
    assert (means["length"], means["reward/length"], means["correct"]) == (2.0, 10.0, 3.0)
