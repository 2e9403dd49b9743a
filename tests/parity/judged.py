"""Compares the values of the reward model in a run with direct calls of the model: python judged.py RUN."""

import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import grpo

model, tokenizer = AutoModelForSequenceClassification.from_pretrained("judge"), AutoTokenizer.from_pretrained("judge")
samples = grpo.load_run(sys.argv[1]).samples()
for prompt, completion, value in zip(samples["prompt"], samples["completion"], samples["reward/judge"], strict=True):
    ids = torch.tensor([tokenizer(prompt + completion).input_ids])
    assert abs(model(ids).logits[0, 0].item() - value) < 1e-4
print(len(samples), "values are the reward model's own")
