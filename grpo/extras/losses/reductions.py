"""More weights of tokens in the loss of an update. loss.py has the first ones, and says what a reduction gets and returns."""

from collections import Counter

from torch import Tensor

from grpo.system import distributed


def prompt_mean(mask: Tensor, group: Tensor) -> Tensor:
    """1 / (P n), with the n tokens of all samples of the prompt, and the P prompts that have one: the mean over the tokens of a
    prompt, then over prompts, ScaleRL, arXiv 2510.13786. With `sequence` a short answer weighs as much as a long one, with
    `token` a prompt of long answers weighs more. Returns [rows, 1]."""
    tokens: Counter[int] = Counter()
    for prompt, count in distributed.all_gather(list(zip(group.tolist(), mask.sum(1).tolist(), strict=True))):
        tokens[prompt] += count
    prompts = sum(count > 0 for count in tokens.values())
    return 1 / (prompts * mask.new_tensor([tokens[prompt] for prompt in group.tolist()])[:, None])
