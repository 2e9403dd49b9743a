"""Real tokenizers with the models' own templates: turns with thoughts and calls are kept token for token, or a new row begins.

`python tests/helpers/real_tokenizers.py` gets the tokenizers; where they are not there, these tests are skipped.
"""

import functools

import pytest
from helpers.families import TOOLS, shipped
from helpers.real_tokenizers import CACHE, HASHES
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo.env.messages import Message, ToolCall
from grpo.extras.tools.renderer import TokenizerRenderer

ASK, SURE, THREE = Message("user", "How many are 1 + 2?"), Message("user", "Sure?"), Message("tool", "3", name="add")
CALL = ToolCall("add", {"a": 1, "b": 2})
JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
GEMMA = '<|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|tool> <tool|> <|tool_response> <tool_response|> <|"|>'
# tokenizer, template of TRL (None: the tokenizer's own), a call as the model writes it, whether its tokens are kept
CALLS = [
    ("qwen3", None, f"<think>\nI add.\n</think>\n\n{JSON}<|im_end|>", True),
    ("qwen3", "qwen2_5", f"I add.\n{JSON}<|im_end|>", True),
    ("qwen3", "qwen3_5_think", f"I add.\n</think>\n\n{XML}<|im_end|>", True),
    ("qwen3", "qwen3_8", f"I add.\n</think>\n\n{XML}<|im_end|>", True),
    ("qwen3", "nemotron_3_nano", f"I add.\n</think>\n{XML}\n<|im_end|>", True),
    ("llama3_1", "llama3_1", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', True),
    ("llama3_1", "llama3_2", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', True),
    (
        "gptoss",
        "gptoss",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        '<|message|>{"a": 1, "b": 2}<|call|>',
        True,
    ),
    (
        "gptoss",
        "gptoss",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        False,  # the template writes the header of a call in another order
    ),
    (
        "gemma3",
        "gemma4_v5",
        "<|channel>thought\nI add.\n<channel|><|tool_call>call:add{a:1,b:2}<tool_call|><|tool_response>",
        True,
    ),
]
TALKS = [
    ("qwen3", None, "Three.<|im_end|>", True),
    ("qwen3", "qwen2_5", "Three.<|im_end|>", True),
    ("qwen3", "qwen3_8", "I add.\n</think>\n\nThree.<|im_end|>", True),
    ("qwen3", None, "<think>\nI add.\n</think>\n\nThree.<|im_end|>", False),
    ("qwen3", "qwen3_5_think", "I add.\n</think>\n\nThree.<|im_end|>", False),
    ("qwen3", "nemotron_3_nano", "I add.\n</think>\nThree.<|im_end|>", False),
    ("gemma3", "gemma4_v5", "<|channel>thought\nI add.\n<channel|>Three.<turn|>", False),
    ("llama3_1", "llama3_2", "Three, I'm sure.<|eot_id|>", True),
    ("gptoss", "gptoss", "<|channel|>final<|message|>Three.<|end|>", True),
    (
        "gptoss",
        "gptoss",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>3.<|return|>",
        False,
    ),
    ("gemma3", None, "Three.<end_of_turn>", True),
    ("deepseek_v3", None, "Three, 1 + 2.<｜end▁of▁sentence｜>", True),
]


@functools.cache
def renderer(name: str, template: str | None) -> TokenizerRenderer:
    if not (CACHE / name).is_dir():
        pytest.skip("python tests/helpers/real_tokenizers.py gets the tokenizers")
    tokenizer = AutoTokenizer.from_pretrained(CACHE / name)
    if template:
        tokenizer.chat_template = shipped(template)
    if template == "gemma4_v5":  # tokens of Gemma 4, which has no package
        tokenizer.add_special_tokens({"additional_special_tokens": GEMMA.split()})
    return TokenizerRenderer(tokenizer, date="2026-01-31")


def after(read: TokenizerRenderer, said: str, reply: Message, tools=()) -> tuple[Message, bool]:
    """Return the message that was sampled, and whether the prompt after the reply begins with its tokens."""
    prompt = read.prompt_ids([ASK], tools)
    before = prompt + tuple(read.tokenizer(said, add_special_tokens=False).input_ids)
    message = read.parse(before[len(prompt) :], tools)
    got = read.prompt_ids([ASK, message, reply], tools, before)
    if got[: len(before)] != before:  # a new row begins, with what the template writes
        assert got == read.prompt_ids([ASK, message, reply], tools)
    return message, got[: len(before)] == before


@pytest.mark.parametrize(("name", "template", "said", "kept"), CALLS)
def test_a_call_comes_back(name, template, said, kept):
    message, same = after(renderer(name, template), said, THREE, TOOLS)
    assert message.tool_calls == (CALL,) and same is kept
    if "I add." in said and "<think>" in message.content:
        assert message.reasoning_content == "I add."


@pytest.mark.parametrize(("name", "template", "said", "kept"), TALKS)
def test_a_turn_comes_back(name, template, said, kept):
    message, same = after(renderer(name, template), said, SURE)
    assert same is kept and ("Three" in message.content or message.content.endswith("3."))


@pytest.mark.parametrize("name", HASHES)
def test_texts_come_back_and_no_start_token_is_doubled(name):
    from grpo.extras.preflight.episodes import loses_spaces

    read = renderer(name, "gptoss" if name == "gptoss" else None)
    text = 'She said: "naïve café" 12 + 34 = 46\n\tif x:  # 数 🙂'
    tokenizer = read.tokenizer
    if (
        name == "deepseek_v3"
    ):  # its class in transformers 5 drops spaces: the preflight refuses it, and names the right class
        assert loses_spaces(text, tokenizer)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(CACHE / name)
    assert not loses_spaces(text, tokenizer)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    ids = read.prompt_ids([ASK])
    assert tokenizer.bos_token_id is None or ids.count(tokenizer.bos_token_id) <= 1
