"""A scripted search agent through all parts: template, tokens, tool calls, BM25, reward, metrics, eval.py."""

import json

import pandas as pd
import pytest
import torch
from conftest import EXAMPLES, compose_config
from helpers.episodes import hop_queries

from eval import evaluate
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion
from grpo.env.types import Reward, State
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.logprobs import completion_logprobs
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate
from grpo.rollout.episodes import play
from grpo.rollout.types import Limits
from grpo.system.errors import UserError
from grpo.system.seeds import derive_seed
from tasks.musique import Musique
from train import train

ROWS = EXAMPLES / "musique.jsonl"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A folder with a small random Llama whose chat template supports tools."""
    from grpo.extras.demo.demo_model import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("agent")
    tokenizer = make_tokenizer(["Who wrote the book? Ada wrote it in 1843."] * 30, tools=True)
    tokenizer.save_pretrained(folder)
    make_model(tokenizer, seed=0).save_pretrained(folder)
    return folder


class Oracle:
    """An engine that knows the solutions: it searches hop by hop, then answers; for an odd seed the answer is wrong."""

    version, context = 0, None

    def __init__(self, tokenizer, examples):
        self.tokenizer, self.examples = tokenizer, examples

    def sample(self, prompts, sampling, seeds, done=None):
        return [self.said(self.tokenizer.decode(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def said(self, prompt: str, seed: int) -> Completion:
        row = next(row for row in self.examples if row["question"] in prompt)
        queries, heard = hop_queries(row), prompt.count("<|tool|>")
        if heard < len(queries):
            call = json.dumps({"name": "search", "arguments": {"query": queries[heard]}})
            text = f"<tool_call>\n{call}\n</tool_call><|end|>"
        else:
            text = f"\\boxed{{{'nobody' if seed % 2 else row['answer']}}}<|end|>"
        ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        return Completion(ids, (-1.0,) * len(ids), "stop")


def test_an_oracle_evaluated_with_pass_at_k_and_by_hops(agent):
    task = Musique(str(ROWS), splits={"test": "test"})
    rows = task.examples("test")
    tokenizer = Pretrained(str(agent)).tokenizer()
    evaluator = Evaluator(Sampling(200), samples=2, limit=None, limits=Limits(max_turns=6))
    evaluation = evaluator(task, Oracle(tokenizer, rows), TokenizerRenderer(tokenizer), seed=3)
    wrong = {}  # by hops: how many of the question's two samples have an odd seed in their last turn
    for p, row in enumerate(rows):
        wrong[row["hops"]] = sum(derive_seed(3, 1, p, s, row["hops"]) % 2 for s in (0, 1))
    assert sorted(wrong) == [2, 3, 4] and 0 < sum(wrong.values()) < 6
    metrics = evaluation.metrics
    assert metrics["eval/accuracy"] == pytest.approx(1 - sum(wrong.values()) / 6)
    assert metrics["eval/pass@2"] == pytest.approx(sum(count < 2 for count in wrong.values()) / 3)
    for hops, count in wrong.items():
        assert metrics[f"eval/hops_{hops}"] == 1 - count / 2
    assert metrics["eval/searches"] == metrics["eval/tool_calls"] == 3 and metrics["eval/turns"] == 4
    assert metrics["eval/supports"] == 1 and metrics["eval/tool_failures"] == metrics["eval/malformed_calls"] == 0

    for sample in (sample for group in evaluation.groups for sample in group):
        assert sample.trajectory.end == "answered"
    batch = collate(evaluation.groups)
    assert batch.sample.tolist() == list(range(6))  # calls render as they were sampled, so each episode is one row
    said = [
        tokenizer.decode(ids[-batch.completion_width :][mask]) for ids, mask in zip(batch.ids, batch.mask, strict=True)
    ]
    for text, group in zip(said[::2], evaluation.groups, strict=True):
        assert text == "".join(
            tokenizer.decode(turn.completion.ids) for turn in group[0].turns
        )  # and no text of a tool


def test_what_the_engine_sampled_is_what_the_loss_scores(agent):
    """Several turns with a random model: over the merged rows, the trainer's log-probabilities equal the engine's."""
    model, tokenizer = Pretrained(str(agent)).model(), Pretrained(str(agent)).tokenizer()
    engine = TransformersEngine()
    engine.load_weights(model, 0)

    class Asking:  # replies to every answer, so that the test does not depend on the random model's tool calls
        def build(self, example):
            task = Musique(str(ROWS), splits={"test": "test"})
            env = task.build(task.examples("test")[example])
            step = env.step

            def told(action):
                state = step(action)
                if state is None and len(env.messages) < 5:
                    env.messages = (*env.messages, action.message, Message("user", "are you sure?"))
                    state = State(env.messages, env.start().tools)
                return state

            env.step = told
            return env

        def score(self, example, trajectory):
            return Reward(0.0, False)

    groups = play(
        Asking(), [0, 1, 2], 4, engine, TokenizerRenderer(tokenizer), Sampling(12), lambda *p: derive_seed(5, *p)
    )
    turns = sum(len(sample.turns) for group in groups for sample in group)
    batch = collate(groups)
    assert turns == 3 * 4 * 3 and 12 <= len(batch) < turns  # some are merged
    with torch.no_grad():
        logprobs, _ = completion_logprobs(model, batch, 1.0)
    torch.testing.assert_close(logprobs[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=0)
    assert int(batch.mask.sum()) == sum(sample.length for group in groups for sample in group)


def settings(agent, tmp_path, *more):
    rows = ("task.splits={train: test, test: null}", "task.held_out.test=0.5", "task.filters=[]")
    model = ("model=path", f"model.path={agent}", "max_tokens=8", "max_turns=2", "trainer=cpu")
    return ["task=musique", f"task.path={ROWS}", *rows, *model, f"output_dir={tmp_path}", *more]


def test_eval_py_evaluates_the_same_environments(agent, tmp_path):
    overrides = settings(agent, tmp_path, "eval.limit=3", "eval.samples=2", "eval.sampling.temperature=1")
    evaluate(compose_config(*overrides, name="eval"))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    told = ("pass@2", "turns", "searches", "supports", "tool_calls")
    assert {f"eval/{name}" for name in told} <= metrics.keys()
    lines = pd.read_parquet(tmp_path / "samples.parquet")
    assert any(name.startswith("eval/hops_") for name in metrics)
    assert len(lines) in (2, 4, 6) and set(lines["end"]) <= {"answered", "truncated", "out_of_turns"}


def test_a_model_without_tools_is_refused_in_one_line(toy, tmp_path):
    with pytest.raises(
        UserError, match="this task has tools, and the chat template does not show them: take a chat model"
    ):
        train(compose_config(*settings(toy, tmp_path)))
