"""Gradients of every preset against finite differences, of an update however it is cut, and of KL terms."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, preset
from helpers.learning import actor_critic, episode, fresh, make_module, rollout
from torch import Tensor, tensor

from grpo.models.logprobs import completion_logprobs
from grpo.objectives.arguments import parameters
from grpo.objectives.batch import TokenBatch
from grpo.objectives.kl import ESTIMATORS
from grpo.objectives.loss import reinforce
from grpo.rollout.collate import collate

PRESETS = sorted(file.stem for file in (ROOT / "conf" / "algo").glob("*.yaml"))
MORE = {  # what a preset needs to have an effect on few tokens
    "clip_cov": ["algo.choice.low=0.0", "algo.choice.share=0.3"],
    "kl_cov": ["algo.choice.share=0.3"],
}

# -- gradients of a loss with respect to the log-probabilities

B, C = 4, 5
MASK = torch.arange(C) < tensor([[5], [1], [3], [2]])


def random_batch(algorithm, seed: int = 0) -> tuple[Tensor, TokenBatch]:
    generator = torch.Generator().manual_seed(seed)

    def near(scale: float) -> Tensor:
        return (-1.0 + scale * torch.randn(B, C, generator=generator, dtype=torch.float64)) * MASK

    batch = TokenBatch(
        ids=torch.zeros(B, C + 1, dtype=torch.int64),
        attention_mask=torch.ones(B, C + 1, dtype=torch.int64),
        mask=MASK,
        rollout_logprobs=near(0.1),
        sample=torch.arange(B),
        advantages=tensor([[1.0], [-0.5], [-1.5], [2.0]], dtype=torch.float64) * MASK,
        old_logprobs=near(0.1),
        reference_logprobs=near(0.4),
        old_entropy=near(0.3).abs(),
        weights=algorithm.weights(MASK).double(),
    )
    return near(0.2).requires_grad_(), algorithm.choose(batch, generator)


def with_parts(algorithm, x: Tensor, batch: TokenBatch) -> TokenBatch:
    """Add the weights of imitation and of a teacher, whose divergence at each token is x^2."""
    share = MASK / MASK.sum().double()
    batch = replace(batch, imitation=share if algorithm.imitation in algorithm.others else None)
    return replace(batch, teaching=share, divergence=x.square()) if algorithm.teacher in algorithm.others else batch


FACTORS = {  # the factors of -A log pi behind a stop-gradient: of a token's log-ratio, that of its row, A
    "cispo": lambda token, row, A: token.exp().clamp(max=5.0),
    "up": lambda token, row, A: torch.where(A > 0, 1.0, torch.where(token < math.log(0.8), 0.0, token.exp())),
    "topr": lambda token, row, A: torch.where(A > 0, 1.0, row.exp().clamp(max=1.0)),
    "vespo": lambda token, row, A: torch.where(
        A >= 0, row.exp() ** 2 * (3 - 3 * row.exp()).exp(), row.exp() ** 3 * (2 - 2 * row.exp()).exp()
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_those_of_finite_differences(name):
    algorithm = preset(f"algo={name}", "max_tokens=7", *MORE.get(name, []))
    logprobs, batch = random_batch(algorithm)
    old = batch.rollout_logprobs if name == "vespo" else algorithm.old_logprobs(batch)
    frozen, log_ratio = logprobs.detach(), (logprobs - old).detach() * MASK
    mean = log_ratio.sum(1, keepdim=True) / MASK.sum(1, keepdim=True)

    def loss(x: Tensor) -> Tensor:
        """Return the preset's loss; if it stops gradients, a function that has its gradient at this point."""
        if name in FACTORS:
            factor = FACTORS[name](log_ratio, log_ratio.sum(1, keepdim=True), batch.advantages)
            return (batch.weights * -factor * batch.advantages * x).sum()
        if name == "p3o":
            r = log_ratio.exp() * MASK
            share = r.sum(1, keepdim=True) ** 2 / (MASK.sum(1, keepdim=True) * (r**2).sum(1, keepdim=True))
            pull = (1 - share) * ((old - x).exp() - 1 - (old - x))
            return (batch.weights * (pull - torch.minimum(r, share) * batch.advantages * x)).sum()
        if name == "gspo_token":  # s_i pi / pi_here, if s_i is within the bounds
            s = mean.exp()
            beyond = ((batch.advantages > 0) & (s > 1 + 4e-4)) | ((batch.advantages < 0) & (s < 1 - 3e-4))
            return (batch.weights * torch.where(beyond, 0.0, -s * (x - frozen).exp() * batch.advantages)).sum()
        return algorithm.loss(x, torch.zeros(B, C), with_parts(algorithm, x, batch))[0]

    learned = with_parts(algorithm, logprobs, batch)
    gradient = torch.autograd.grad(algorithm.loss(logprobs, torch.zeros(B, C), learned)[0], logprobs)[0]
    step = 1e-6
    for i, j in MASK.nonzero().tolist():
        change = torch.zeros(B, C, dtype=torch.float64)
        change[i, j] = step
        difference = (loss(frozen + change) - loss(frozen - change)) / (2 * step)
        assert gradient[i, j].item() == pytest.approx(difference.item(), abs=1e-7), (i, j)
    assert gradient.abs().max() > 1e-3 and not gradient[~MASK].any()


def test_gspo_and_gspo_token_agree_where_advantages_do():
    """With one advantage for a row both have the gradient s_i A / |o_i| for each of its tokens."""
    for seed in range(3):
        gradients = []
        for name in ("gspo", "gspo_token"):
            algorithm = preset(f"algo={name}", "algo.surrogate.low=0.04", "algo.surrogate.high=0.04")
            logprobs, batch = random_batch(algorithm, seed)
            gradients.append(torch.autograd.grad(algorithm.loss(logprobs, torch.zeros(B, C), batch)[0], logprobs)[0])
        torch.testing.assert_close(*gradients)


# -- gradients of an update with respect to the weights: at lr 1 the change is the gradient

GROUPS = [
    [episode((11, 12, 13), ids) for ids in [(21, 22), (23,), (24, 25, 26, 27), (22, 21)]],
    [episode((14,), ids) for ids in [(24, 25, 26, 27), (28, 29, 30), (31,), (22, 23, 24)]],
]
REWARDS = tensor([[1.0, 0.0, 0.3, 0.0], [0.0, 1.0, 0.0, 0.2]])


def tokens_of(policy) -> TokenBatch:
    """Return the rollout as a slightly different policy would have sampled it, so that ratios are not 1."""
    tokens = collate(GROUPS)
    logprobs, entropy = completion_logprobs(policy, tokens, 1.0)
    noise = [0.15 * torch.randn(tokens.mask.shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    old = (logprobs.detach() + noise[0]) * tokens.mask
    rollout = (old + 0.2 * noise[1]) * tokens.mask
    return replace(tokens, old_logprobs=old, old_entropy=entropy.detach(), rollout_logprobs=rollout)


def padded(tokens: TokenBatch, left: int, right: int) -> TokenBatch:
    def pad(values: Tensor, left: int) -> Tensor:
        return torch.nn.functional.pad(values, (left, right))

    change = {name: pad(getattr(tokens, name), left) for name in ("ids", "attention_mask")}
    names = ("mask", "rollout_logprobs", "old_logprobs", "old_entropy", "turn", "given")
    change |= {name: pad(getattr(tokens, name), 0) for name in names}
    return replace(tokens, **change)


def gradient(toy, name: str, max_tokens: int, change=lambda tokens: tokens) -> dict[str, Tensor]:
    policy = fresh(toy)
    algorithm = preset(f"algo={name}", "max_tokens=4", *MORE.get(name, []))
    make = actor_critic if "values" in parameters(algorithm.advantage) else make_module
    module = make(policy, max_tokens_per_microbatch=max_tokens, lr=1.0, **vars(algorithm))
    before = {name: p.detach().clone() for name, p in module.trained().items()}
    parts = {"greedy": tensor([[0.2], [0.1]]).expand(REWARDS.shape)}  # for ReMax
    tokens = change(tokens_of(policy))
    metrics = module.training_step(rollout(rewards=REWARDS, groups=GROUPS, tokens=tokens, parts=parts), 0)
    assert metrics["loss/grad_norm"] > 0.01
    return {name: before[name] - p.detach() for name, p in module.trained().items()}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.slow
def test_an_update_is_the_same_however_it_is_cut(toy, name):
    if not preset(f"algo={name}", "max_tokens=7").policy_coef:
        pytest.skip("it learns from texts or a teacher alone: tests/extras/teachers/test_taught.py")
    whole = gradient(toy, name, 1000)
    others = {
        "a row at a time": gradient(toy, name, 1),
        "microbatches of 20 tokens": gradient(toy, name, 20),
        "another order": gradient(toy, name, 20, lambda tokens: tokens.rows(torch.tensor([5, 2, 7, 0, 3, 6, 1, 4]))),
        "more padding": gradient(toy, name, 1000, lambda tokens: padded(tokens, 3, 2)),
    }
    for what, pieces in others.items():
        for parameter, expected in whole.items():
            torch.testing.assert_close(pieces[parameter], expected, atol=1e-6, rtol=1e-5, msg=f"{what}: {parameter}")


# -- gradients of a KL term, in expectation: a policy over five outcomes, a million samples

THETA = tensor([0.5, -0.3, 0.9, 0.0, -1.0], dtype=torch.float64)
REFERENCE = tensor([-1.0, 1.2, -0.6, 1.0, -2.0], dtype=torch.float64).log_softmax(0)
STALE = tensor([0.2, 0.1, 0.6, 0.3, -0.5], dtype=torch.float64).log_softmax(0)


def exact(reverse: bool) -> Tensor:
    theta = THETA.clone().requires_grad_()
    logprobs = theta.log_softmax(0)
    kl = (
        (logprobs.exp() * (logprobs - REFERENCE)).sum() if reverse else (REFERENCE.exp() * (REFERENCE - logprobs)).sum()
    )
    return torch.autograd.grad(kl, theta)[0]


def sampled(loss, sampler: Tensor) -> Tensor:
    """Return the gradient of the mean of loss(logprobs, target, old) over samples of `sampler`."""
    x = torch.multinomial(sampler.exp(), 1_000_000, replacement=True, generator=torch.Generator().manual_seed(0))
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(loss(theta.log_softmax(0)[x], REFERENCE[x], sampler[x]).mean(), theta)[0]


def in_loss(estimator: str):
    return lambda logprobs, target, old: ESTIMATORS[estimator](logprobs, target)


def with_ratio(estimator: str):
    return lambda logprobs, target, old: (logprobs - old).exp() * ESTIMATORS[estimator](logprobs, target)


def in_reward(estimator: str):
    return lambda logprobs, target, old: reinforce(logprobs, -ESTIMATORS[estimator](logprobs, target).detach())


@pytest.mark.parametrize(
    ("loss", "stale", "expected"),
    [
        (in_loss("k1"), False, torch.zeros(5)),
        (in_loss("k2"), False, exact(reverse=True)),
        (in_loss("k3"), False, exact(reverse=False)),
        (in_reward("k1"), False, exact(reverse=True)),
        (with_ratio("k1"), True, exact(reverse=True)),
        (with_ratio("k3"), True, exact(reverse=True)),
    ],
    ids=["k1: nothing", "k2: the KL", "k3: the other KL", "k1 in the reward", "k1 with ratio", "k3 with ratio"],
)
def test_what_a_kl_term_pulls_at(loss, stale, expected):
    assert (exact(reverse=True) - exact(reverse=False)).abs().max() > 0.05  # the two differ clearly
    got = sampled(loss, STALE if stale else THETA.log_softmax(0))
    torch.testing.assert_close(got, expected.double(), atol=0.005, rtol=0)


def test_stale_samples_without_the_ratio_pull_elsewhere():
    got = sampled(in_loss("k2"), STALE)
    assert (got - exact(reverse=True)).abs().max() > 0.02
