"""Chat templates that behave like those of five families of models, on small tokenizers with the special tokens of each.

They are our own, in tests/data/templates, with shorter prose and the same behaviour: where and how tools and calls are written,
what is trimmed, which thinking is kept, who writes the first token, what is refused.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import EXAMPLES
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from grpo.extras.tools.env import spec_of
from grpo.extras.tools.renderer import TokenizerRenderer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


TOOLS = (spec_of(add),)


def shipped(name: str) -> str:
    """A model's own chat template, which TRL ships; a test without TRL is skipped."""
    if (spec := find_spec("trl")) is None:
        pytest.skip("TRL is not installed")
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def template(name: str) -> str:
    return (EXAMPLES / "templates" / f"{name}.jinja").read_text()


@dataclass(frozen=True)
class Family:
    """special, plain: its tokens; skip_special_tokens drops only the first. call: add(a=1, b=2) as the template writes it. calls:
    this call and then add(a=3, b=4)."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    end: str
    bos: str | None
    call: str
    calls: str

    def tokenizer(self) -> PreTrainedTokenizerFast:
        from grpo.extras.demo.demo_model import make_tokenizer

        texts = [
            self.calls,
            "How many are 1 + 2? Let me see. There are 3.",
            '{"type": "function", "properties": "integer"}',
        ]
        tokenizer = make_tokenizer(texts * 30)
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.plain])
        tokenizer.eos_token, tokenizer.bos_token = self.end, self.bos
        tokenizer.chat_template = self.template
        return tokenizer


A, B = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 3, "b": 4}}'
IM, TAGS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<tool_call>", "</tool_call>")
BLOCK, BLOCKS = (f"<tool_call>\n{A}\n</tool_call>", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>")
RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "qwen25": Family(template("qwen25"), IM, TAGS, "<|im_end|>", None, BLOCK, BLOCKS),
    # thinking is shown only after a user's last question; a tool's response is not a question
    "qwen3": Family(template("qwen3"), IM, (*TAGS, "<think>", "</think>"), "<|im_end|>", None, BLOCK, BLOCKS),
    # an assistant's words beside a call are lost; responses of tools have their own role
    "hermes": Family(
        template("hermes"), (*IM, "<|begin_of_text|>"), TAGS, "<|im_end|>", "<|begin_of_text|>", BLOCK, BLOCKS
    ),
    "llama31": Family(
        template("llama31"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        (),
        "<|eot_id|>",
        "<|begin_of_text|>",
        A.replace("arguments", "parameters"),
        f"{A}; {B}".replace("arguments", "parameters"),
    ),
    # tools stand before the last question
    "mistral": Family(
        template("mistral"),
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", *RESULTS),
        (),
        "</s>",
        "<s>",
        f'[TOOL_CALLS] [{A[:-1]}, "id": "abcDEF123"}}]',
        f'[TOOL_CALLS] [{A[:-1]}, "id": "abcDEF123"}}, {B[:-1]}, "id": "abcDEF124"}}]',
    ),
}


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Return the ids of the text, one per character, unlike the tokenizer's own encoding. Its added tokens stay whole."""
    added = sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)
    ids, at = [], 0
    while at < len(text):
        whole = next((token for token in added if text.startswith(token, at)), None)
        piece = whole or text[at]
        ids += tokenizer(piece, add_special_tokens=False).input_ids
        at += len(piece)
    return tuple(ids)


def real(template: str, **template_args) -> TokenizerRenderer:
    """A model's own template, which TRL ships, on a small tokenizer with the special tokens of the template."""
    source = shipped(template)
    tokenizer = FAMILIES["qwen3"].tokenizer()
    tokens = sorted({*re.findall('<\\|\\w+\\|?>|<\\w+\\|>|<\\|"\\|>|<\uff5c[^<>]+\uff5c>', source)})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.chat_template = source
    return TokenizerRenderer(tokenizer, template_args=template_args)
