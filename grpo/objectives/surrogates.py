"""More surrogates, each a function of one paper. loss.py has the first ones, and says what a surrogate gets and returns."""

from typing import Annotated

import torch
from torch import Tensor

from grpo.objectives.loss import Loss
from grpo.system.ranges import Positive, Range


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, bound: Annotated[float, Range(1)] = 5.0) -> Loss:
    """-sg(min(r, bound)) A log pi: bounds the weight, so that every token keeps a gradient (arXiv 2506.13585). bound: on
    the ratio itself, 5 in ScaleRL (arXiv 2510.13786)."""
    weight = ratio.detach().clamp(max=bound)
    return -weight * advantages * logprobs, {"clip_fraction_high": ratio > bound}


def sapo(ratio: Tensor, advantages: Tensor, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Tensor:
    """-sigmoid(tau (r - 1)) 4 / tau A: a soft gate, steepest at r = 1, where it has PPO's gradient (arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
