"""The longest sequence of a run: what vLLM must have room for. A renderer here writes one token for each character."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from conftest import compose_config

from grpo.apps import longest
from grpo.apps.engines import engine_of
from grpo.apps.longest import most_tokens
from grpo.engines.context import bounded
from grpo.engines.protocol import Sampling
from grpo.engines.vllm.settings import params_of
from grpo.env.messages import Message
from grpo.env.types import SingleTurn, State
from grpo.rollout.prompt_limit import PromptLimit
from grpo.rollout.types import Limits, Plan
from grpo.system.errors import UserError

LETTERS = SimpleNamespace(prompt_ids=lambda messages, tools=(): tuple(map(ord, messages[0].content)))


@dataclass
class Questions:
    """A task whose examples are the lengths of its prompts."""

    built: list[int] = field(default_factory=list)

    def build(self, example: int) -> SingleTurn:
        self.built.append(example)
        return SingleTurn((Message("user", "x" * example),))


class Talks(Questions):
    def build(self, example: int):
        return SimpleNamespace(start=lambda: State((Message("user", "x" * example),)))


class Chance(Questions):
    """Its prompts depend on the seed."""

    def build(self, example: int, seed: int = 0) -> SingleTurn:
        return super().build(example + seed)


class Slow(Questions):
    looks = 3


def played(max_tokens: int, max_turns: int = 16) -> Plan:
    return Plan(2, 2, 1, Sampling(max_tokens), Limits(max_turns))


ANY = PromptLimit()


def most(*rows, limit=ANY, answers=(30,), turns=16, context=1000):
    uses = [played(answer, turns) for answer in answers]
    sources = {str(i): (task, "train") for i, (task, _) in enumerate(rows)}
    examples = {str(i): lengths for i, (_, lengths) in enumerate(rows)}
    return most_tokens(limit.within(context, max(answers)), sources, examples, LETTERS, uses)


def test_it_is_the_longest_prompt_of_all_rows_and_the_longest_answer():
    train, held_out = (Questions(), [5, 40, 7]), (Questions(), [50, 3])
    assert most(train) == 40 + 30
    assert most(train, held_out) == most(held_out, train) == 50 + 30
    assert most(train, held_out, answers=(30, 100)) == 50 + 100  # of training and of evaluations


def test_no_bound_is_one_of_the_models_context():
    assert most((Questions(), [970])) is None and most((Questions(), [969])) == 999
    assert most((Questions(), [5]), (None, ())) is None  # samples come from a source


@pytest.mark.parametrize("task", [Talks(), Chance(), Slow()], ids=lambda task: type(task).__name__)
def test_what_cannot_be_known_keeps_the_context(task):
    assert most((task, [5, 6])) is None
    assert most((Questions(), [5]), (task, [5, 6])) is None
    assert most((task, [5, 6]), limit=PromptLimit(200)) is None
    assert most((task, [5, 6]), limit=PromptLimit(200), turns=1) == 200 + 30  # one prompt, and the limit holds for it
    assert most((task, [5, 6]), limit=PromptLimit(200, "truncate")) == 200 + 30  # of every turn


def test_of_very_many_rows_it_reads_some_and_allows_for_twice_their_longest(monkeypatch):
    monkeypatch.setattr(longest, "READ", 4)
    task = Questions()
    assert most((task, [10, 90, 20, 90, 30, 90, 40, 90])) == 2 * 40 + 30
    assert {*task.built} == {10, 20, 30, 40}
    assert most((Questions(), [10, 20, 40, 30])) == 40 + 30


def test_an_example_that_fails_bounds_nothing():
    class Broken(Questions):
        def build(self, example: int) -> SingleTurn:
            if example == 6:
                raise ValueError("no such row")
            return super().build(example)

    assert most((Broken(), [5, 6])) == 5 + 30


def test_an_engine_gets_the_bound_unless_the_user_gives_the_length():
    assert bounded({"max_model_len": None}, lambda: 70) == {"max_model_len": 71}  # `score` samples one token more
    assert bounded({}, lambda: None) == {} == bounded({}, None)
    assert bounded({"max_model_len": 500}, lambda: pytest.fail("nobody needs it")) == {}


def test_a_prompt_that_is_longer_than_expected_is_refused_and_no_answer_is_cut():
    """The bound is 40 + 30 tokens, and vLLM's context one more."""
    sampling = Sampling(30)
    params_of([[1] * 3, [1] * 41], sampling, [], 71, whole=True)
    with pytest.raises(UserError, match="of 42 tokens and an answer of 30 exceed the context of 71: raise"):
        params_of([[1] * 3, [1] * 42], sampling, [], 71, whole=True)
    params_of([[1] * 70], sampling, [], 71)  # the user's own length: an answer may end at it
    with pytest.raises(UserError, match="of 71 tokens and an answer of 1 exceed"):
        params_of([[1] * 71], sampling, [], 71)


class Takes:
    def __init__(self, path: str, most_tokens=None) -> None:
        self.most = most_tokens and most_tokens()


class Older:
    def __init__(self, path: str) -> None:
        self.most = None


@pytest.mark.parametrize(("name", "found"), [("Takes", 70), ("Older", None)])
def test_only_an_engine_that_takes_a_bound_is_given_it(name, found):
    config = compose_config("engine=auto", f"engine._target_=test_longest.{name}", "~engine.devices", "~engine.nodes")
    assert engine_of(config, lambda: 70).most == found


def test_the_built_in_engine_reads_no_row_for_it():
    for name in ("auto", "transformers"):  # auto: there is no GPU here
        engine_of(compose_config(f"engine={name}"), lambda: pytest.fail("a row was read"))
