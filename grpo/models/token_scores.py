"""Log-probabilities and entropies of logits, with the gradient of the logits by hand.

    z = logits / temperature, m = max z, s = sum exp(z - m)
    log p(y) = z_y - m - log s,    H = log s - sum exp(z - m) (z - m) / s

No softmax is stored: only the logits, if they are wanted again, and three numbers for each row. On a GPU the
formulas are compiled into kernels that write no other tensor of [n, V] than the gradient. On a CPU they are
computed for a few rows at a time, whose numbers stay in its cache.

Shapes: n tokens, V vocabulary.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from grpo.models.compiled import Compiled

CACHED = 1 << 18  # logits that a CPU takes at a time: a megabyte in float32


def divided(rows: Tensor, temperature: float | Tensor) -> Tensor:
    """Return rows / temperature. rows: [n, ...]; temperature: a number, or one for each row, [n]."""
    if isinstance(temperature, Tensor):
        return rows / temperature[:, None]
    return rows if temperature == 1 else rows / temperature


def temperature_at(temperature: float | Tensor, at: slice) -> float | Tensor:
    """Return the temperature of these rows."""
    return temperature[at] if isinstance(temperature, Tensor) else temperature


def scores_of_rows(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p(targets), the entropies and log sum exp z, [n] float32 each. logits: [n, V]; targets: [n];
    temperature: a number, or one for each row, [n]."""
    z = divided(logits.float(), temperature)
    most = z.amax(dim=-1, keepdim=True)  # not log_softmax: autograd would keep its result, another [n, V]
    z = z - most
    weights = z.exp()
    total = weights.sum(dim=-1)
    mean = (weights * z.clamp(min=-1e4)).sum(dim=-1) / total  # a logit of -inf adds 0
    log_total = total.log()
    return z.gather(-1, targets[:, None])[:, 0] - log_total, log_total - mean, most[:, 0] + log_total


def gradient_of_rows(
    logits: Tensor,
    log_sums: Tensor,
    of_logprobs: Tensor,
    temperature: float | Tensor,
    entropy: Tensor | None = None,
    of_entropy: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the logits without the part that only targets have, [n, V] in their number type.

    d log p(y) / d z = onehot(y) - p, and d H / d z = -p (log p + H). log_sums, entropy: of `scores_of_rows`,
    [n]. of_logprobs, of_entropy: the gradients of the results, [n]. Without the last two the entropy has no
    gradient.
    """
    z = divided(logits.float(), temperature)
    log_p = z - log_sums[:, None]
    factor = of_logprobs[:, None]
    if entropy is not None:
        factor = factor + of_entropy[:, None] * (log_p.clamp(min=-1e4) + entropy[:, None])
    return (log_p.exp() * -divided(factor, temperature)).to(logits.dtype)


forward, backward = Compiled(scores_of_rows), Compiled(gradient_of_rows)


def few_rows(logits: Tensor) -> list[slice]:
    """Return the places of the rows that are computed together: all of them on a GPU, on a CPU those that its
    cache holds."""
    size = max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    places = [slice(start, start + size) for start in range(0, len(logits), size)]
    # in a forecast two, where all pieces need the same memory: one would be the whole
    return places[:2] if isinstance(logits, FakeTensor) else places


def scores_of_logits(logits: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `scores_of_rows` does. logits: [n, V], without a gradient."""
    scores = logits.new_empty(3, len(logits), dtype=torch.float32)
    for at in few_rows(logits):
        of_rows = forward(logits[at], targets[at], temperature_at(temperature, at))
        for values, of_each in zip(scores, of_rows, strict=True):
            values[at] = of_each
    return tuple(scores)


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, [n, V] in their number type. saved: the results of
    `scores_of_logits`. of_entropy: None if the entropy has no gradient."""
    logprobs, entropy, log_sums = saved
    args = [logits, log_sums, of_logprobs, temperature]
    if of_entropy is not None:
        args += [entropy, of_entropy]
    if len(places := few_rows(logits)) == 1:
        gradient = backward(*args)
    else:
        gradient = torch.empty_like(logits)
        for at in places:
            gradient[at] = backward(*(arg[at] if isinstance(arg, Tensor) else arg for arg in args))
    factor = of_logprobs if of_entropy is None else of_logprobs + of_entropy * (logprobs + entropy)
    of_targets = (of_logprobs - logprobs.exp() * factor) / temperature  # [n]
    return gradient.scatter_(-1, targets[:, None], of_targets[:, None].to(gradient.dtype))


class OfLogits(Function):
    """`scores_of_logits` of logits that autograd has made."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float | Tensor, entropy_gradient: bool):
        logits = logits.detach()
        saved = scores_of_logits(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, *saved)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(saved[1])
        return saved[:2]

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logprobs: Tensor, of_entropy: Tensor):
        logits, targets, *saved = ctx.saved_tensors
        of_entropy = of_entropy if ctx.entropy_gradient else None
        return gradient_of_logits(logits, targets, ctx.temperature, saved, of_logprobs, of_entropy), None, None, None
