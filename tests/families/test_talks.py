"""Episodes of several turns with tools and thoughts, in the models' own templates: calls are run, and tokens become rows."""

import pytest
from conftest import seed
from helpers.families import add, real

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.tokens import Completion
from grpo.env.types import Reward
from grpo.extras.tools.env import ToolEnv
from grpo.rollout.collate import collate
from grpo.rollout.episodes import play

JSON, LFM = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "[add(a=1, b=2)]"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
ARGS = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", 1), ("b", 2)))
GLM = f"<tool_call>add\n{ARGS}</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
OTHER = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
# a template of TRL, a turn with a call, the last turn, the rows of an episode with two calls
EPISODES = {
    "qwen2_5": (f"I add.\n{JSON}<|im_end|>", "Six.<|im_end|>", 1),
    "qwen3": (f"<think>\nI add.\n</think>\n\n{JSON}<|im_end|>", "<think>\nDone.\n</think>\n\nSix.<|im_end|>", 1),
    "qwen3_5_think": (f"I add.\n</think>\n\n{XML}<|im_end|>", "Done.\n</think>\n\nSix.<|im_end|>", 1),
    "qwen3_8": (f"I add.\n</think>\n\n{XML}<|im_end|>", "Done.\n</think>\n\nSix.<|im_end|>", 1),
    "nemotron_3_nano": (f"I add.\n</think>\n{XML}\n<|im_end|>", "Done.\n</think>\nSix.<|im_end|>", 1),
    "gemma4_v5": (
        "<|channel>thought\nI add.\n<channel|><|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>",
        "Six.<turn|>",
        1,
    ),
    "gptoss": (
        f'{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{"a": 1, "b": 2}}<|call|>',
        "<|channel|>final<|message|>Six.<|return|>",
        1,
    ),
    "gptoss, another header": (ANALYSIS + OTHER, "<|channel|>final<|message|>Six.<|return|>", 3),  # each turn is a row
    "glm4moe": (f"\n<think>I add.</think>\n{GLM}<|observation|>", "\n<think>Done.</think>\nSix.<|user|>", 1),
    "lfm2_2_5": (f"<think>I add.</think><|tool_call_start|>{LFM}<|tool_call_end|><|im_end|>", "Six.<|im_end|>", 1),
    "llama3_2": ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "Six.<|eot_id|>", 1),
}


class Script:
    """An engine that says the texts of an episode, one per turn."""

    version, context = 0, None

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, list(texts)

    def sample(self, prompts, sampling, seeds, done=None):
        assert len(prompts) == 1
        ids = tuple(self.tokenizer(self.texts.pop(0), add_special_tokens=False).input_ids)
        return [Completion(ids, (-1.0,) * len(ids), "stop")]


class Sums:
    """A question, and a tool that adds."""

    def build(self, example):
        return ToolEnv([Message("user", "How many are 1 + 2 + 3?")], [add])

    def score(self, example, trajectory):
        return Reward(float("Six" in trajectory.messages[-1].content), True)


@pytest.mark.parametrize("name", EPISODES)
def test_an_episode_with_two_calls(name):
    call, last, rows = EPISODES[name]
    renderer = real(name.partition(",")[0])
    tokenizer = renderer.tokenizer
    [group] = play(Sums(), [{}], 1, Script(tokenizer, [call, call, last]), renderer, Sampling(200), seed)
    [sample] = group
    assert sample.trajectory.end == "answered" and sample.reward.value == 1
    heard = [message for message in sample.trajectory.messages if message.role == "tool"]
    assert [message.content for message in heard] == ["3", "3"] and not any(message.error for message in heard)
    thoughts = [m.reasoning_content for m in sample.trajectory.messages if m.role == "assistant"]
    assert thoughts[0] == ("I add." if "I add." in call and name != "qwen2_5" else None)
    batch = collate([group])
    assert len(batch) == rows
    sampled = [ids[-batch.completion_width :][mask] for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    texts = tokenizer.decode([i for ids in sampled for i in ids.tolist()], spaces_between_special_tokens=False)
    assert texts == call + call + last  # every sampled token is learned from once, and none of the tool's
