"""The agents of examples/agents play episodes of task=agent."""

import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, seed
from helpers.documents import blocks

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.tokens import rows_of_turns
from grpo.env.types import Reward
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.extras.vllm_server.launch import free_ports
from grpo.models.pretrained import Pretrained
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from tasks.agent import Agent


def example_run(name: str, row: dict, tmp_path: Path, model: str, group_size: int = 2) -> list:
    """The samples of an example's program, by one of the demo's models."""
    trained = Pretrained(str(ROOT / "grpo/extras/demo/demo_models" / model))
    engine, renderer = TransformersEngine(), TokenizerRenderer(trained.tokenizer())
    engine.load_weights(trained.model(), 0)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    command = f"python {ROOT / 'examples/agents' / name}"
    task = Agent(str(tmp_path / "rows.jsonl"), command, splits={"train": "train"})
    limits = Limits(max_turns=6, step_timeout=120)
    (group,) = play(task, task.examples("train"), group_size, engine, renderer, Sampling(40), seed, limits)
    assert not any(sample.trajectory.failed for sample in group), group[0].trajectory.error
    return group


@pytest.mark.slow
def test_the_example_on_the_openai_client(tmp_path):
    pytest.importorskip("openai")
    row = {"prompt": "Sam has 214 coins. Sam buys 13 bags of 42 coins. How many coins does Sam have?", "answer": "760"}
    group = example_run("openai_tools.py", row, tmp_path, "calculator", group_size=8)
    assert max(len(sample.turns) for sample in group) > 1  # it called the calculator
    assert all(len(rows_of_turns(sample.turns)) == 1 for sample in group)  # and its rows are exact
    called = [m for sample in group for m in sample.trajectory.messages if m.role == "tool"]
    assert called and all(m.name == "calculator" for m in called)


@pytest.mark.slow
def test_the_page_serves_a_policy_from_a_notebook(tmp_path):
    """The best policy of a run answers, and its server ends."""
    pytest.importorskip("openai")
    shutil.copytree(ROOT / "grpo/extras/demo/demo_models/wordmath", tmp_path / "checkpoints" / "best")
    (cell,) = [text for text in blocks(ROOT / "docs" / "serve.md", "py") if "Popen" in text]
    space = {"run": SimpleNamespace(folder=tmp_path)}
    with redirect_stdout(StringIO()) as said:
        try:
            exec(cell.replace("8000", str(free_ports(1)[0])), space)
        finally:
            space["server"].terminate()
    first, *answer = said.getvalue().strip().split("\n")
    assert first.startswith("serving ") and "\\boxed{" in answer[-1], said.getvalue()
    assert space["server"].wait(60) != 0


@pytest.mark.slow
def test_the_example_on_the_anthropic_client(tmp_path):
    pytest.importorskip("anthropic")
    row = {"prompt": "Sam has 14 coins. Sam buys 3 bags of 4 coins. How many coins does Sam have?", "answer": "26"}
    for sample in example_run("anthropic_retry.py", row, tmp_path, "wordmath", group_size=4):
        texts = [step.action.message.content for step in sample.trajectory.steps]
        right = ["\\boxed{26}" in text for text in texts]
        assert len(texts) == sample.reward.parts["attempts"] == len(rows_of_turns(sample.turns))
        assert sample.reward.value == (right[-1] and 1 / len(texts)) and sample.reward.correct == right[0]


@pytest.mark.slow
def test_the_example_on_a_harness_of_verifiers(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    if not shutil.which("uv"):
        pytest.skip("the harness is started by uv, which is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples/agents"), prepend=os.pathsep)
    row = {"prompt": "Sam has 214 coins. Sam buys 13 bags of 42 coins. How many coins does Sam have?", "answer": "760"}
    for sample in example_run("verifiers_harness.py", row, tmp_path, "calculator"):
        assert sample.reward.parts == {"turns": len(sample.turns)} and len(rows_of_turns(sample.turns)) == 1
        assert sample.reward.correct == ("\\boxed{760}" in sample.trajectory.answer)


def test_the_example_of_a_coding_agent(tmp_path):
    sys.path.insert(0, str(ROOT / "examples/agents"))
    import problems

    for state in problems.worked_programs(50, 0):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(state.messages[1].content, {})
        assert printed.getvalue().strip().isdigit()
    row = {"prompt": "Sam has 14 coins. How many coins does Sam have?", "answer": "14"}
    for sample in example_run("coder.py", row, tmp_path, "wordmath"):  # which writes no programs
        assert sample.reward == Reward(0.0, False, {"runs": 0.0})
