"""Tasks made of other libraries, each where it is installed; nothing is downloaded."""

import json
import os
import random
import shutil

import pytest
from conftest import ROOT, compose_config, seed
from hydra.utils import instantiate

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.intake import close_env
from grpo.env.messages import Message, ToolCall
from grpo.env.scoring import score_group
from grpo.env.tokens import rows_of_turns
from grpo.env.types import Action, Reward, State, Step, Trajectory
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from grpo.system.calls import awaited
from grpo.system.errors import UserError
from tasks.libraries.gym import Gym


def task_of(*overrides: str):
    return instantiate(compose_config("output_dir=.", *overrides).task)


def played(env, *texts: str) -> list:
    """Start an environment, say these texts, and return what it gave."""
    return [awaited(env.start()), *(awaited(env.step(Action(Message("assistant", text)))) for text in texts)]


@pytest.mark.slow
def test_reasoning_gym_grades_its_own_problems():
    library = pytest.importorskip("reasoning_gym")
    task = task_of("task=reasoning_gym", "task.config={max_terms: 2, max_digits: 1}", "task.test_size=20")
    before = random.getstate()
    train, test = task.examples("train"), task.examples("test")
    assert len(train) == 20000 and 10 < len(test) <= 20  # equal questions count once
    assert not {row["question"] for row in test} & {train[i]["question"] for i in range(300)}
    row = train[0]
    assert row["question"] == train[0]["question"] and row["answer"] == str(eval(row["metadata"]["expression"]))
    for text, value in ((f"so \\boxed{{{row['answer']}}}", 1.0), ("\\boxed{999}", 0.0), ("none", 0.0)):
        _, reward = played(task.build(row), text)
        assert (reward.value, reward.correct) == (value, value == 1)
        trajectory = Trajectory((Step(State(()), Action(Message("assistant", text))),), reward=reward)
        assert score_group(task, row, [trajectory])[0].value == value
    assert random.getstate() == before
    with pytest.raises(UserError, match="every question is one of the test"):
        task_of("task=reasoning_gym", "task.config={max_terms: 2, max_digits: 1}", "task.test_size=3000").examples(
            "train"
        )[0]
    with pytest.raises(Exception, match="not registered"):
        task_of("task=reasoning_gym", "task.dataset=chain_sun")
    assert "chain_sum" in library.factory.DATASETS


def test_gymnasium_in_words():
    pytest.importorskip("gymnasium")
    task = task_of(
        "task=gym", "task.make=gymnasium:FrozenLake-v1", "task.arguments={render_mode: ansi, is_slippery: false}",
        "task.actions=[left,down,right,up]", "task.prompt='Reach G.'",
    )  # fmt: skip
    env = task.build(task.examples("train")[0])
    states = played(env, "I go right", "left, no: right", *["down"] * 3, "right")
    assert states[0].messages[0].content.startswith("Reach G.\n[S]FFF\nFHFH")
    assert "S[F]FF" in states[1].messages[-1].content and len(states[1].messages) == 3
    assert isinstance(states[-1], Reward) and states[-1] == Reward(1.0, True)  # the goal
    _, fell = played(task.build({"seed": 1}), "down")[0], played(task.build({"seed": 1}), "down", "right")[-1]
    assert fell == Reward(0.0, False)  # a hole
    env = task.build({"seed": 2})
    played(env, "?")
    assert env.outcome() == Reward(0.0, False)
    env.close()
    short = task_of("task=gym", "task.make=gymnasium:FrozenLake-v1", "task.arguments={max_episode_steps: 2}",
                    "task.actions=[left,right]").build({"seed": 3})  # fmt: skip
    assert [type(one) for one in played(short, "left", "left")] == [State, State, Reward]  # cut short at the start
    short.close()


def test_textarena_does_not_disturb_others():
    pytest.importorskip("textarena")
    task = task_of("task=gym", "task.make=textarena:GuessTheNumber-v0")
    before = random.getstate()
    states = played(task.build({"seed": 3}), "[5]")
    assert "between 1 and 20" in states[0].messages[0].content and "[GAME]" in states[1].messages[-1].content
    env, found = task.build({"seed": 3}), None
    awaited(env.start())
    for number in range(1, 21):
        found = awaited(env.step(Action(Message("assistant", f"[{number}]"))))
        if isinstance(found, Reward):
            break
    assert isinstance(found, Reward) and random.getstate() == before


CLIENT = """
from types import SimpleNamespace

class Client:
    def __init__(self, goal): self.goal, self.closed = goal, False
    async def reset(self, seed): return SimpleNamespace(observation={"n": seed}, reward=None, done=False)
    async def step(self, action):
        return SimpleNamespace(observation={"n": action["number"]}, reward=0.5, done=action["number"] == self.goal)
    async def close(self): self.closed = True

def observe(env, observation): return f"at {observation['n']}"
def act(text): return {"number": int(text)}
"""


def test_a_client_in_openenv_s_form_and_functions_of_the_user(tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    named = [
        f"task.{key}={tmp_path}/client.py:{name}"
        for key, name in (("make", "Client"), ("observe", "observe"), ("act", "act"))
    ]
    task = task_of("task=gym", "task.arguments={goal: 7}", *named)
    env = task.build({"seed": 4})
    first, second, end = played(env, "5", "7")
    assert [state.messages[-1].content for state in (first, second)] == ["at 4", "at 5"]
    assert end == Reward(1.0, True)  # .5 twice
    awaited(env.close())
    assert env.env.closed


def test_skyrl_gym(tmp_path):
    pytest.importorskip("skyrl_gym")
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "reward_spec": {"ground_truth": str(n + 1)}}
        for n in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = task_of("task=skyrl_gym", f"task.path={tmp_path}/rows.jsonl", "task.env=gsm8k", "task.held_out.test=0.3")
    row = task.examples("train")[0]
    gold = row["reward_spec"]["ground_truth"]
    state, reward = played(task.build(row), f"so\n#### {gold}")
    assert state.messages[0].content == row["prompt"][0]["content"] and reward == Reward(1.0, True)
    assert played(task.build(row), "#### 77")[-1].value < 1


TASKSET = """
from verifiers import v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, task: Data, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(task.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)

class Config(vf.TasksetConfig):
    most: int = 5

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        return [Sum(Data(prompt=f"{n} + 1?", system_prompt="Add.", answer=str(n + 1))) for n in range(self.config.most)]
"""


def test_a_taskset_of_verifiers(tmp_path):
    pytest.importorskip("verifiers")
    (tmp_path / "sums.py").write_text(TASKSET)
    task = task_of(
        "task=verifiers", f"task.taskset={tmp_path}/sums.py:Sums", "task.config={most: 7}", "task.test_size=2"
    )
    assert [row["prompt"] for row in task.examples("test")] == ["0 + 1?", "1 + 1?"] and len(task.examples("train")) == 5
    row = task.examples("train")[0]
    state = task.build(row).start()
    assert state.messages == (Message("system", "Add."), Message("user", "2 + 1?"))

    def reward(text: str) -> Reward:
        return awaited(task.score(row, Trajectory((Step(state, Action(Message("assistant", text))),))))

    assert reward("3") == Reward(1.5, True, {"right": 1.0, "short": 1.0})
    assert reward("it is 4") == Reward(0.0, False, {"right": 0.0, "short": 0.0})


@pytest.mark.slow
def test_an_agent_of_verifiers_plays_several_turns(tmp_path, monkeypatch):
    """The demo's model calls the calculator of a taskset; the library runs the loop, the tool and the reward."""
    pytest.importorskip("verifiers")
    if not shutil.which("uv"):
        pytest.skip("uv, which starts the harness, is not installed")
    text = (ROOT / "examples/agents/verifiers_calculator.py").read_text()
    question = "Sam has 214 coins. Sam buys 13 bags of 42 coins. How many coins does Sam have?"
    tasks = f'[Question(Data(prompt="{question}", answer="760"))]'
    (tmp_path / "questions.py").write_text(text.replace("return []  # the rows come from the run", f"return {tasks}"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}/examples/agents", prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(ROOT / "examples/agents"))
    trained = Pretrained(str(ROOT / "grpo/extras/demo/demo_models/calculator"))
    engine, renderer = TransformersEngine(), TokenizerRenderer(trained.tokenizer())
    engine.load_weights(trained.model(), 0)
    task = task_of("task=verifiers", f"task.taskset={tmp_path}/questions.py:Questions", "task.agent={max_turns: 6}")
    limits = Limits(max_turns=6, step_timeout=120)
    (group,) = play(task, task.examples("test"), 4, engine, renderer, Sampling(40), seed, limits)
    assert not any(sample.trajectory.failed for sample in group), group[0].trajectory.error
    for sample in group:
        right = "\\boxed{760}" in sample.trajectory.answer
        assert (sample.reward.value, sample.reward.correct) == (right, right) and sample.reward.parts["right"] == right
        assert len(rows_of_turns(sample.turns)) == 1
    assert max(len(sample.turns) for sample in group) > 1
    called = [m for sample in group for m in sample.trajectory.messages if m.role == "tool"]
    assert called and all(m.name == "calculator" for m in called)


def test_what_verifiers_refuses_is_one_line(tmp_path):
    pytest.importorskip("verifiers")
    (tmp_path / "unnamed.py").write_text(TASKSET)
    (tmp_path / "named.py").write_text(f"{TASKSET}\n__all__ = ['Sums']\n")
    for file, agent, line in (("unnamed", "{}", "defines no `__all__`"), ("named", "{max_turn: 6}", "max_turn")):
        with pytest.raises(Exception, match=f"verifiers refuses .*{line}"):
            task_of("task=verifiers", f"task.taskset={tmp_path}/{file}.py:Sums", f"task.agent={agent}")


FACTORY = """
class Counter:
    def __init__(self): self.count, self.closed = 0, False
    def reset(self, start, **row): self.count = start; return f" It starts at {start}."
    def add(self, number: int) -> int:
        \"\"\"Add to the counter.

        Args:
            number: what to add
        \"\"\"
        self.count += number
        return self.count
    async def get_reward(self): return 0.5 if self.count == 7 else 0.0
    def _hidden(self): ...
    def close(self): self.closed = True

def counts(environments, **columns): return [env.count for env in environments]
"""


def test_an_environment_in_trl_s_factory_form(tmp_path, caplog):
    (tmp_path / "counter.py").write_text(FACTORY)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Reach 7, row {i}.", "start": 3}}\n' for i in range(5)))
    caplog.set_level("INFO")
    task = task_of(
        "task=jsonl", f"task.path={tmp_path}/rows.jsonl", f"task.environment={tmp_path}/counter.py:Counter",
        f"task.rewards=[environment,{tmp_path}/counter.py:counts]", "task.weights={counts: 0}", "task.solved=0.5",
    )  # fmt: skip
    row = task.examples("train")[0]
    assert "task.prompt=prompt is a text: a user's message" in caplog.text
    env = task.build(row)
    first = env.start()
    assert first.messages == (Message("user", f"{row['prompt']} It starts at 3."),)
    assert [tool.name for tool in first.tools] == ["add"]
    call = Action(Message("assistant", "", (ToolCall("add", {"number": 4}),)))
    assert env.step(call).messages[-1] == Message("tool", "7", name="add")
    outcome = awaited(env.outcome())
    assert outcome == Reward(0.5, True)
    [reward] = score_group(task, row, [Trajectory((Step(first, call),), reward=outcome)], [env])
    assert (reward.value, reward.correct, reward.parts) == (0.5, True, {"counts": 7.0})
    close_env(env)
    assert env.closed and not hasattr(env, "_nothing")


def test_a_word_that_begins_another_one_is_not_taken_for_it():
    task = Gym("builtins.dict", actions=["1", "10", "left"])
    assert [task.chosen(text) for text in ("1 or 10", "10, no: 1", "left", "?")] == [1, 0, 2, 0]
