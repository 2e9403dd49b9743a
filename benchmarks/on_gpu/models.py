"""Shapes: models with random weights, the lengths of their prompts and answers, and the arithmetic of an update.

`drawn` answers end at random: exponential lengths with a mean of half the limit, cut at the limit (0.43 of it on average).
`full` answers all have the length of the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from shapes import Group, batch_of, flops_of_parts
from transformers import PretrainedConfig, Qwen2Config, Qwen3Config

from grpo.objectives.batch import TokenBatch


def config(
    kind: type[PretrainedConfig],
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    **more,
) -> PretrainedConfig:
    """Return the configuration of a model without an end token."""
    return kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=None,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
        **{"tie_word_embeddings": True} | more,
    )


@dataclass(frozen=True)
class Shape:
    """A model, and the rows of an update.

    prompts, group: prompts of a rollout and answers to each. prompt, answer: their tokens at most. at_once: tokens that go
    through the model at once; None: the default. lora: only an adapter learns. steps: updates that are timed.
    """

    config: PretrainedConfig
    prompts: int = 8
    group: int = 8
    prompt: int = 256
    answer: int = 1024
    drawn: bool = True
    at_once: int | None = None
    lora: bool = False
    steps: int = 4

    @property
    def overrides(self) -> list[str]:
        """The settings of train.py that the shape needs."""
        at_once = f"optim.max_tokens_per_microbatch={self.at_once or 'null'}"
        return [at_once, "adapter=lora"] if self.lora else [at_once]

    def groups(self, turn: int) -> list[Group]:
        """Return the lengths of the rows of an update, others in each turn."""
        size = self.prompts, self.group
        lengths = torch.full(size, self.answer)
        if self.drawn:
            generator = torch.Generator().manual_seed(turn)
            lengths = torch.empty(size).exponential_(2 / self.answer, generator=generator).ceil().clamp(2, self.answer)
        return [(self.prompt, row) for row in lengths.long().tolist()]

    def batch(self, turn: int) -> TokenBatch:
        """Return the rows of an update: random tokens."""
        return batch_of(self.groups(turn), self.config.vocab_size)


QWEN06 = partial(config, Qwen3Config, 1024, 3072, 28, 16, 8, 151936, head_dim=128)
LONG = {"prompts": 1, "group": 2, "prompt": 384, "drawn": False}  # two rows, each of which is a microbatch
SHAPES = {
    "tiny": Shape(config(Qwen2Config, 64, 128, 2, 2, 1, 1100), prompts=2, group=4, prompt=16, answer=48, steps=2),
    "0.5b": Shape(config(Qwen2Config, 896, 4864, 24, 14, 2, 151936)),
    "1.5b": Shape(config(Qwen2Config, 1536, 8960, 28, 12, 2, 151936)),
    "7b-lora": Shape(
        config(Qwen2Config, 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False), lora=True, steps=2
    ),
    "0.6b-16k": Shape(QWEN06(), **LONG, answer=16384 - 384, at_once=16384, steps=2),
    "0.6b-65k": Shape(QWEN06(), **LONG, answer=65536 - 384, at_once=65536, steps=1),
}


def needed_flops(config: PretrainedConfig, groups: Sequence[Group], adapter: int = 0) -> float:
    """Return the operations that an update needs if it computes each prompt once and nothing again.

    Products: 3 times those of a forward pass, as inputs and weights have gradients. With an adapter, whose parameters these are:
    twice, and 6 for each of them and token. Attention: 3 times.
    """
    products, attention = flops_of_parts(config, groups)
    passed = sum(prompt + sum(answers) - len(answers) for prompt, answers in groups)
    return (2 if adapter else 3) * products + 6 * adapter * passed + 3 * attention


def rule_of_thumb(parameters: int, tokens: int, adapter: int = 0) -> float:
    """Return 6 operations for each parameter and token of the rows; with an adapter 4, and 6 for each of its parameters."""
    return (4 * parameters + 6 * adapter if adapter else 6 * parameters) * tokens
