"""Engines of a user's own."""

from dataclasses import dataclass

from transformers import AutoTokenizer

from grpo.engines.builtin.engine import TransformersEngine


@dataclass
class Said:
    ids: list[int]
    logprobs: list[float]
    finish: str


class Telling(TransformersEngine):
    """Prints when it gets weights, and its prompts."""

    def load_weights(self, model, version):
        print("weights of version", version)
        super().load_weights(model, version)

    def sample(self, prompts, *rest):
        print("prompts", sorted({tuple(prompt) for prompt in prompts}))
        return super().sample(prompts, *rest)


class Lying(TransformersEngine):
    """Its log-probabilities are too low by one nat: the trainer would call the policy another one."""

    def sample(self, prompts, sampling, seeds, done=None):
        found = super().sample(prompts, sampling, seeds)
        return [Said(list(one.ids), [value - 1 for value in one.logprobs], one.finish) for one in found]


class Mute(TransformersEngine):
    """Keeps its log-probabilities to itself."""

    def sample(self, prompts, sampling, seeds, done=None):
        found = super().sample(prompts, sampling, seeds)
        return [Said(list(one.ids), [], one.finish) for one in found]


class Scripted:
    """Says one text after another, a text a turn."""

    context = 4096
    version = -1

    def __init__(self, says, max_cache_tokens):
        self.says = says

    def load_weights(self, model, version):
        self.tokenizer, self.version = AutoTokenizer.from_pretrained(model.name_or_path), version

    def sample(self, prompts, sampling, seeds, done=None):
        begin = self.tokenizer.convert_tokens_to_ids("<|assistant|>")
        texts = [self.says[min(list(prompt).count(begin), len(self.says)) - 1] for prompt in prompts]
        rows = [[*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id] for text in texts]
        return [Said(row, [-0.1] * len(row), "stop") for row in rows]

    def close(self):
        pass
