"""The slots are structural: classes that import nothing of this project fit them, at run time and for mypy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import foreign
from helpers.foreign_typed import completion  # that file can be imported, too
from helpers.project import imports

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.scoring import score_group
from grpo.env.tokens import Completion, completion_of
from grpo.env.types import Reward
from grpo.rollout.collate import collate, scores
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from grpo.system.errors import UserError

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"

# two answers an episode: of two samples that are asked 1+2?, then of two that an asynchronous environment asks 2+2?
ANSWERS = ["3", "3", "no", "3", "4", "5", "maybe", "never asked for"]


def test_the_foreign_classes_import_nothing_of_ours():
    names = imports(HELPERS / "foreign.py")
    assert names and {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def played(engine: foreign.Engine, limits: Limits | None = None):
    task, seed = foreign.Task(), lambda p, s, t: 4 * p + 2 * s + t
    return play(task, task.examples("train"), 2, engine, foreign.Renderer(), Sampling(4), seed, limits)


def test_foreign_classes_play_together():
    engine = foreign.Engine(ANSWERS)
    groups = played(engine)
    (first, second), (waited, cut) = groups

    def conversation(question: str, *rest: tuple[str, str]) -> tuple[Message, ...]:
        return (Message("user", question), *(Message(role, text) for role, text in rest))

    asked, sure = conversation("1+2?"), conversation("1+2?", ("assistant", "3"), ("user", "sure?"))
    assert [step.state.messages for step in first.trajectory.steps] == [asked, sure]
    assert [step.action.message for step in first.trajectory.steps] == [Message("assistant", "3")] * 2
    assert first.trajectory.messages == (*sure, Message("assistant", "3"))
    assert second.trajectory.messages == conversation(
        "1+2?", ("assistant", "no"), ("user", "sure?"), ("assistant", "3")
    )
    assert waited.trajectory.messages == conversation("2+2?", ("assistant", "4"), ("user", "sure?"), ("assistant", "5"))
    # 4 of the 6 tokens; then 7 + 4 + 9 exceed the 23 - 4 for which the engine has room
    assert cut.trajectory.messages == conversation("2+2?", ("assistant", "mayb"), ("user", "sure?"))
    assert [sample.trajectory.end for group in groups for sample in group] == ["answered"] * 3 + ["truncated"]
    assert [sample.trajectory.steps[0].action.truncated for group in groups for sample in group] == [False] * 3 + [True]

    assert first.turns[0].prompt_ids == (1, 4, 13, 5, 15, 0, 2)  # >1+2?, a line feed, <
    assert first.turns[0].completion == Completion((6, 0), (-0.25, -0.5), "stop")
    assert first.turns[1].prompt_ids == (1, 4, 13, 5, 15, 0, 2, 6, 0, 1, 35, 37, 34, 21, 15, 0, 2)
    assert cut.turns[0].completion == Completion((29, 17, 41, 18), (-0.25, -0.5, -0.75, -1.0), "length")
    # each call of the engine has the prompts of all waiting episodes
    assert [len(prompt) for prompt in engine.prompts] == [7, 7, 7, 7, 17, 18, 17]

    right, wrong = Reward(2.0, True, {"letters": 1.0}), Reward(-1.0, False, {"letters": 1.0})
    assert [sample.reward for sample in (first, second, waited)] == [right, right, wrong]
    assert cut.reward == Reward(-1.0, False, {"letters": 4.0})


def test_a_class_with_both_methods_scores_the_group_and_one_that_adds_a_score_each_sample():
    class Both(foreign.Task):
        def score_group(self, example, trajectories):
            return [Reward(float(len(trajectories)), True) for _ in trajectories]

        def score(self, example, trajectory):
            return Reward(-1.0, False)

    class Own(Both):
        def score(self, example, trajectory):
            return Reward(7.0, True)

    two = [sample.trajectory for sample in played(foreign.Engine(ANSWERS))[0]]
    assert [[reward.value for reward in score_group(task, {}, two)] for task in (Both(), Own())] == [[2, 2], [7, 7]]


def test_turns_and_the_context_end_an_episode_when_they_are_full():
    def ends(engine, *limits):
        return [(len(s.turns), s.trajectory.end) for group in played(engine, *limits) for s in group]

    assert ends(foreign.Engine(ANSWERS), Limits(max_turns=1)) == [(1, "out_of_turns")] * 3 + [(1, "truncated")]
    small = foreign.Engine(ANSWERS)
    small.context = 18 + 4  # the longest prompt, which is of the second sample, and an answer
    assert ends(small) == [(2, "answered")] * 3 + [(1, "truncated")]
    small.context -= 1
    assert ends(small) == [(2, "answered"), (1, "truncated"), (2, "answered"), (1, "truncated")]


def test_what_foreign_classes_played_becomes_tensors():
    groups = played(foreign.Engine(ANSWERS))
    batch, scored = collate(groups), scores(groups)
    prompt, again = [1, 4, 13, 5, 15, 0, 2], [1, 35, 37, 34, 21, 15, 0, 2]
    assert batch.ids.shape == (4, 7 + 13) and batch.sample.tolist() == [0, 1, 2, 3]  # two turns, one row
    assert batch.ids[0].tolist() == [*prompt, 6, 0, *again, 6, 0, 0]
    assert batch.ids[1].tolist() == [*prompt, 30, 31, 0, *again, 6, 0]
    assert batch.ids[3].tolist() == [1, 5, 13, 5, 15, 0, 2, 29, 17, 41, 18, *[0] * 9]
    assert batch.attention_mask.sum(1).tolist() == [19, 20, 19, 11]
    masks = ["11........11.", "111........11", "11........11.", "1111........."]
    assert ["".join(".1"[sampled] for sampled in row) for row in batch.mask.tolist()] == masks
    assert batch.rollout_logprobs[1].tolist() == [-0.25, -0.5, -0.75, *[0] * 8, -0.25, -0.5]
    assert scored.rewards.tolist() == [[2, 2], [-1, -1]] and scored.lengths.tolist() == [[4, 5], [4, 4]]
    assert scored.truncated.tolist() == [[False, False], [False, True]]
    assert scored.parts["correct"].tolist() == [[1, 1], [0, 0]] and scored.parts["letters"].tolist() == [[1, 1], [1, 4]]


def test_engines_that_break_their_word_are_told_so():
    class Forgetful(foreign.Engine):
        def sample(self, *args):
            return super().sample(*args)[:-1]

    class Odd(foreign.Engine):
        def answer(self, seed, most):
            return foreign.Completion([1], [-1.0], "eos")

    with pytest.raises(ValueError, match="shorter"):  # not repeated forever
        played(Forgetful(ANSWERS))
    with pytest.raises(ValueError, match="finish is one of stop, length, not 'eos'"):
        played(Odd(ANSWERS))
    assert completion_of(completion) == Completion((), (), "stop")
    assert completion_of(Completion((), (), "stop", temperature=0.5)).temperature == 0.5


@pytest.mark.parametrize("value", [0.5, float("nan"), float("-inf")])
def test_log_probabilities_that_are_none_are_refused_with_the_engines_name(value):
    class Broken(foreign.Engine):
        def answer(self, seed, most):
            return foreign.Completion([1, 2], [1e-6, value], "stop")  # the first one is a rounding error

    line = f"the engine Broken gave {value} as the log-probability of token 2: it must be a finite number of at most 0"
    with pytest.raises(UserError, match=line):
        played(Broken(ANSWERS))


def mypy(cache: Path, *files: Path) -> str:
    """Return the errors that mypy finds in files; in those that pyproject.toml names, without any."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", cache, "--config-file", ROOT / "pyproject.toml", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stdout + found.stderr  # otherwise it failed before checking types
    return found.stdout if found.returncode else ""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """The folder in which mypy keeps what it knows of the project for the next call."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.slow
def test_the_slots_and_what_is_in_them_type_check(cache):
    assert mypy(cache) == ""


WRONG = [
    ("Env", "-> State | None:\n        if", "-> str | None:\n        if"),
    ("Env", "async def step", "async def move"),
    ("EnvBuilder", "-> Env | AsyncEnv:", "-> str:"),
    ("EnvBuilder", "def build(self, ", "def build(self, place: int, "),
    ("RewardModel", "trajectory: Episode) -> Reward:", "trajectory: Episode) -> float:"),
    ("RewardModel", "trajectory: Episode)", "answer: str)"),
    ("Task", "def examples", "def rows"),
    ("Renderer", ", before: Sequence[int] = ()", ""),
    ("Renderer", "tools: Sequence[object] = ()) -> Message:", "tools: Sequence[object] = ()) -> str:"),
    ("Engine", "self.version", "self.weights"),
    ("Engine", "    ) -> list[Completion]:", "    ) -> list[list[int]]:"),
    ("Engine", "def close", "def shut"),
    ("MessageLike", "    role: str\n    content: str", "    role: str\n    text: str"),
    ("StateLike", "    messages: list[Text | dict[str, str]]\n", "    messages: str\n"),
    ("RewardLike", "    correct: bool\n", "    right: bool\n"),
    ("CompletionLike", 'finish: Literal["stop", "length"]', "finish: str"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory, cache) -> str:
    """Return what mypy says of all wrong classes. WRONG[i] is in foreign_i.py and foreign_typed_i.py."""
    folder, files = tmp_path_factory.mktemp("wrong"), []
    for i, (_, right, wrong) in enumerate(WRONG):
        text = (HELPERS / "foreign.py").read_text()
        assert right in text
        typed = (
            (HELPERS / "foreign_typed.py")
            .read_text()
            .replace("from helpers import foreign", f"import foreign_{i} as foreign")
        )
        for name, content in ((f"foreign_{i}.py", text.replace(right, wrong)), (f"foreign_typed_{i}.py", typed)):
            files.append(folder / name)
            files[-1].write_text(content)
    return mypy(cache, *files)


@pytest.mark.parametrize(("i", "slot"), enumerate(slot for slot, *_ in WRONG))
@pytest.mark.slow
def test_a_class_that_does_not_fit_is_told_of_its_slot(errors, i, slot):
    named = rf'foreign_typed_{i}\.py:\d+: error: .*variable has type "([a-z.]+\.)?{slot}"'
    assert re.search(named, errors), errors
