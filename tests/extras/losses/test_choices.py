"""Which tokens the surrogate counts: by hand, and the same however rows lie."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import preset
from helpers.learning import batch_of
from torch import tensor

from grpo.extras.losses.choices import clip_cov, covariance, without_top_cov
from grpo.objectives.choice import chosen_tokens, top_entropy
from grpo.system import distributed


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_upper_fifth_by_entropy():
    assert top_entropy(torch.arange(10.0), 0.2).nonzero().flatten().tolist() == [8, 9]


# advantages of mean 0, log-probabilities of mean -2
ADVANTAGES, LOGPROBS = tensor([4.0, -2.0, 2.0, -4.0, 0.0]), tensor([-1.0, -3.0, -1.5, -2.0, -2.5])


def test_covariance():
    assert covariance(LOGPROBS, ADVANTAGES).tolist() == covariance(LOGPROBS, ADVANTAGES + 3).tolist() == [4, 2, 1, 0, 0]


def test_kl_cov_picks_the_tokens_of_highest_covariance():
    assert without_top_cov(LOGPROBS, ADVANTAGES).tolist() == [False, True, True, True, True]  # one at least
    assert without_top_cov(LOGPROBS, ADVANTAGES, share=0.4).tolist() == [False, False, True, True, True]
    assert without_top_cov(LOGPROBS[:0], ADVANTAGES[:0]).tolist() == []


def test_clip_cov_draws_among_the_tokens_between_its_bounds():
    left_out = [(~clip_cov(LOGPROBS, ADVANTAGES, seeded(i), low=0.5, high=3.0)).nonzero().tolist() for i in range(20)]
    assert {tuple(*places) for places in left_out} == {(1,), (2,)}  # one at a time, each of the two
    both = clip_cov(LOGPROBS, ADVANTAGES, seeded(), share=0.9, low=0.5, high=3.0)
    assert both.tolist() == [True, False, False, True, True]
    assert clip_cov(LOGPROBS, ADVANTAGES, seeded(), low=4.0).all()  # none between 4 and 5


ROWS = replace(
    batch_of([[-1.0, -3.0, -2.0], [-2.0, -1.0, 0.0], [-4.0, 0.0, 0.0], [-1.0, -2.5, -0.5]], [[0.0] * 3] * 4, [3, 2, 1, 3]),
    sample=tensor([2, 0, 1, 0]),  # the last row is the second of its sample
    old_entropy=torch.arange(12.0).view(4, 3),
    advantages=tensor([[2.0], [-1.0], [-3.0], [1.0]]).expand(4, 3),
)  # fmt: skip


@pytest.mark.parametrize(
    "choice",
    [partial(top_entropy, share=0.4), partial(without_top_cov, share=0.3), partial(clip_cov, share=0.3, low=0.0)],
)
def test_a_choice_is_the_same_for_every_order_of_rows_and_every_number_of_ranks(choice, monkeypatch):
    whole = chosen_tokens(choice, ROWS, seeded(3))
    assert 0 < whole.sum() < ROWS.mask.sum() and not whole[~ROWS.mask].any()
    order = tensor([2, 1, 3, 0])
    assert torch.equal(chosen_tokens(choice, ROWS.rows(order), seeded(3)), whole[order])
    ranks, sent = [tensor([0, 2]), tensor([1, 3])], []
    monkeypatch.setattr(distributed, "all_gather", lambda items: sent.extend(items) or items)
    for mine in ranks:  # each rank sends its tokens
        chosen_tokens(choice, ROWS.rows(mine), seeded(3))
    monkeypatch.setattr(distributed, "all_gather", lambda items: sent)
    for rank, mine in enumerate(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert torch.equal(chosen_tokens(choice, ROWS.rows(mine), seeded(3)), whole[mine])


def test_a_surrogate_that_names_counted_says_itself_what_it_means():
    algorithm = preset("algo=kl_cov", "algo.choice.share=0.2", "max_tokens=4")
    batch = algorithm.choose(ROWS, seeded())
    batch = replace(batch, weights=algorithm.weights(batch.mask))
    assert (~batch.counted & batch.mask).sum() == 1  # int(0.2 x 9)
    logprobs = (batch.old_logprobs + 0.1).requires_grad_()
    loss, _ = algorithm.loss(logprobs, torch.zeros(4, 3), batch)
    # advantages: 3 x 2 - 2 x 1 - 1 x 3 + 3 x 1 = 4
    torch.testing.assert_close(loss, (-4 * tensor(0.1).exp() + 0.1) / 9)
    assert not algorithm.skips_zero_advantages  # the KL pulls on these, too
    assert preset("algo=clip_cov").skips_zero_advantages and preset("algo=clip_cov").needs_old is not False
