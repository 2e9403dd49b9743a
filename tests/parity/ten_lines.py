"""Trains from Python, with objects: model, tokenizer, rows, reward, optimizer, callbacks, and pieces in the place of others."""

from functools import partial

import lightning as L
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.optimization import get_scheduler

import grpo
from grpo.rollout.episodes import play
from grpo.training.module import GRPOModule

model, tokenizer = AutoModelForCausalLM.from_pretrained("toy"), AutoTokenizer.from_pretrained("toy")
rows = load_dataset("json", data_files="texts.jsonl", split="train").to_iterable_dataset()
done = []


def brief(completions, **columns):
    return [-float(len(text)) for text in completions]


class Counts(L.Callback):
    def on_train_batch_end(self, trainer, module, *rest):
        done.append(type(module).__name__)


class Backwards:
    def __init__(self, examples, size, seed):
        self.examples = list(reversed(examples))

    def draw(self, rollout, count, first=0):
        return self.examples[first : first + count]

    def progress(self, rollouts):
        return {}


class Mine(GRPOModule):
    pass


def played(*arguments):
    done.append("played")
    return play(*arguments)


settings = {"debug": "smoke", "preflight": "off", "max_tokens": 8, "sampler": Backwards, "play": played, "module": Mine}
settings |= {"task.held_out.test": 0, "rollout": {"num_rollouts": 1, "prompts": 2}, "eval": {"every": 0}}
optimizers = {"optimizer": partial(torch.optim.SGD, lr=0.1), "schedule": partial(get_scheduler, "constant")}
callbacks = ["checkpoint", "samples", Counts()]  # in place of the default ones
run = grpo.train(model, dataset=rows, tokenizer=tokenizer, rewards=brief, callbacks=callbacks, **optimizers, **settings)
assert run.model is model and run.metrics["lr"].dropna().tolist() == [0.1]
print("order", done, run.samples()["prompt"].unique().tolist()[0][:3])
