"""More weights of tokens in the loss of an update. loss.py has the first ones, and says what a reduction gets and returns."""

import torch
from torch import Tensor

from grpo.system import distributed
from grpo.system.ranges import Count


def prompt_mean(mask: Tensor, sample: Tensor, group_size: Count = 8) -> Tensor:
    """1 / (P n), with the n tokens of all samples of the prompt, and the P prompts that have one: the mean over the tokens of a
    prompt, then over prompts, ScaleRL, arXiv 2510.13786. With `sequence` a short answer weighs as much as a long one, with
    `token` a prompt of long answers weighs more. group_size: samples of a prompt that are learned from. Returns [rows, 1]."""
    prompt = sample // group_size
    tokens: dict[int, int] = {}
    for number, count in distributed.all_gather(list(zip(prompt.tolist(), mask.sum(1).int().tolist(), strict=True))):
        tokens[number] = tokens.get(number, 0) + count
    prompts = sum(count > 0 for count in tokens.values())
    return 1 / (prompts * torch.tensor([[float(tokens[number])] for number in prompt.tolist()], device=mask.device))
