"""The advantages of turns, tokens and roles against numbers worked by hand."""

import math
from functools import partial

import pytest
import torch
from conftest import preset
from helpers.learning import GROUPS, fresh, make_module, rollout
from torch import tensor

from grpo.apps.try_algorithm import check_algorithm
from grpo.env.intake import observation
from grpo.env.messages import Message
from grpo.env.types import State
from grpo.extras.losses.turns import RoleBaseline, gigpo, optimal_token, peers, remax, returns, turn_returns
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.loss import clip
from grpo.rollout.collate import collate
from grpo.system.errors import UserError

NAN = math.nan
close = partial(torch.testing.assert_close, equal_nan=True)

# two samples of one prompt, of three turns and of two, and a third without a reward
STEPS = tensor([[[0.0, 1, 2], [4.0, 0, NAN], [1.0, NAN, NAN]]])
REWARDS = tensor([[3.0, 4.0, NAN]])


def test_returns_of_turns():
    close(returns(REWARDS, STEPS), tensor([[[3.0, 3, 2], [4.0, 0, NAN], [NAN] * 3]]))
    close(returns(REWARDS, STEPS, gamma=0.5), tensor([[[1.0, 2, 2], [4.0, 0, NAN], [NAN] * 3]]))
    close(returns(tensor([[0.0]]), tensor([[[0.0, 1, 0, -1]]])), tensor([[[0.0, 0, -1, -1]]]))


def test_a_turn_is_compared_with_the_same_turn_of_other_samples():
    # means 3.5 and 1.5; the third turn is alone
    close(turn_returns(REWARDS, STEPS), tensor([[[-0.5, 1.5, 0], [0.5, -1.5, NAN], [NAN] * 3]]))
    close(turn_returns(REWARDS, STEPS, 0.5, baseline=False), returns(REWARDS, STEPS, 0.5))


def test_gigpo_compares_turns_with_one_observation():
    seen = [[["start", "hall", "start"], ["start", "cellar"], ["start"]]]
    # returns 1 2 2 and 4 0, episodes -0.5 and 0.5; at the start 1, 2 and 4: mean 7/3
    got = gigpo(REWARDS, STEPS, seen, gamma=0.5)
    close(got, tensor([[[-0.5 - 4 / 3, -0.5, -0.5 - 1 / 3], [0.5 + 5 / 3, 0.5, NAN], [NAN] * 3]]))
    without = gigpo(REWARDS, STEPS, seen, weight=0.0)
    close(without[0, :2, :2], tensor([[-0.5, -0.5], [0.5, 0.5]]))
    equal = gigpo(tensor([[0.1] * 3]), tensor([[[0.1]] * 3]), [[["start"]] * 3])
    assert torch.equal(equal, torch.zeros(1, 3, 1))


def test_an_observation_is_what_is_new_to_the_policy():
    said = [Message(role, text) for role, text in (("user", "a"), ("assistant", "b"), ("tool", "c"), ("user", "d"))]
    assert [observation(State(tuple(said[:n]))) for n in (1, 3, 4)] == ["a", "c", "c\nd"]


def test_the_optimal_baseline_of_a_token():
    """w = 1 - 2 p + sum p^2. Two samples of one prompt, of one token and of three, the last in a row of its own."""
    mask = tensor([[True, False, False], [True, True, False], [True, False, False]])
    sample, turn = tensor([0, 1, 1]), tensor([[0, -1, -1], [0, 0, -1], [1, -1, -1]])
    old = tensor([[0.5, 9, 9], [0.25, 0.5, 9], [0.5, 9, 9]]).log()
    squares = tensor([[0.5, 1, 1], [1.0, 0.5, 1], [0.5, 1, 1]])  # w: 0.5; 1.5 and 0.5; 0.5
    steps = tensor([[[1.0, NAN], [0.0, -1.0]]])
    got = optimal_token(tensor([[1.0, -1.0]]), steps, mask, sample, turn, old, squares)
    # at the first place (0.5 x 1 - 1.5 x 1) / 2 = -0.5, later there is one sample alone: R itself
    close(got, tensor([[1.5, 0, 0], [-0.5, -1, 0], [-1.0, 0, 0]]))
    # two tokens of each: w 0.5 0.5 and 1.5 0.5, so the second place has weights 1 and 2, and the baseline -1/3
    old2, squares2 = tensor([[0.5, 0.5], [0.25, 0.5]]).log(), tensor([[0.5, 0.5], [1.0, 0.5]])
    both = torch.ones(2, 2, dtype=torch.bool), tensor([0, 1]), torch.zeros(2, 2, dtype=torch.int64), old2, squares2
    two = optimal_token(tensor([[1.0, -1.0]]), tensor([[[1.0], [-1.0]]]), *both)
    close(two, tensor([[1.5, 4 / 3], [-0.5, -2 / 3]]))
    order = tensor([1, 0, 2])
    again = optimal_token(
        tensor([[1.0, -1.0]]), steps, mask[order], sample[order], turn[order], old[order], squares[order]
    )
    close(again, got[order])
    same = optimal_token(tensor([[0.1, 0.1]]), tensor([[[0.1, NAN], [0.1, 0]]]), mask, sample, turn, old, squares)
    assert same[:2, 0].tolist() == [0, 0]  # exactly
    rows = [0, 1, 2, 0]  # a third sample without a reward is as if it were not there
    given = mask[rows], tensor([0, 1, 1, 2]), turn[rows], old[rows], squares[rows]
    more = torch.cat([steps, torch.full((1, 1, 2), NAN)], dim=1)
    unknown = optimal_token(tensor([[1.0, -1.0, NAN]]), more, *given)
    close(unknown, torch.cat([got, tensor([[NAN, 0, 0]])]))
    # 2 against 0.5 and 1.5, of two prompts: the second is alone, and its reward is unknown
    far = optimal_token(
        tensor([[1.0], [NAN]]), tensor([[[1.0]], [[NAN]]]), mask[:2], sample[:2], turn[:2], old[:2], squares[:2]
    )
    assert far[0, 0] == 1 and far[1, :2].isnan().all()


@pytest.mark.parametrize("layout", ["padded", "shared_prompt"])
def test_the_sum_of_squared_probabilities(toy, layout):
    """It is over the whole vocabulary, and comes from log-probabilities at two temperatures."""
    module = make_module(fresh(toy), advantage=optimal_token, layout=layout)
    assert module.algorithm.needs_old and module.algorithm.freezes_first
    tokens = module.freeze(collate(GROUPS))
    row, width = 1, tokens.prompt_width
    logits = module.policy(
        input_ids=tokens.ids[row : row + 1], attention_mask=tokens.attention_mask[row : row + 1]
    ).logits
    expected = (logits[0, width - 1 : -1] / module.temperature).softmax(-1).square().sum(-1)
    mask = tokens.mask[row]
    close(tokens.prob_squares[row][mask], expected[mask].detach(), atol=1e-5, rtol=1e-4)
    assert module.training_step(rollout(rewards=tensor([[1.0, 0.0], [0.0, 0.5]])), 0)["loss/grad_norm"] > 0


def test_remax_compares_with_the_greedy_answer():
    close(remax(tensor([[1.0, 0.0]]), {"greedy": tensor([[0.25, 0.25]])}), tensor([[0.75, -0.25]]))
    with pytest.raises(UserError, match="parts has no 'greedy', the reward of a greedy answer; it has correct"):
        remax(tensor([[1.0]]), {"correct": tensor([[1.0]])})


EXAMPLES = [
    {"role": role, "source": source} for role, source in (("solve", 1), ("propose", 1), ("solve", 1), ("solve", 2))
]


def test_peers_are_compared_within_their_role():
    rewards = tensor([[1.0, 0], [0.5, 0.1], [1.0, NAN], [0.1, 0.1]])
    # solvers of 1: 1 0 1, mean 2/3; proposers 0.3; solvers of 2 are equal
    expected = tensor([[1 / 3, -2 / 3], [0.2, -0.2], [1 / 3, NAN], [0, 0]])
    close(peers(rewards, EXAMPLES), expected)
    close(peers(rewards[:, :1], EXAMPLES, columns=["role"])[1], tensor([0.0]))  # alone
    with pytest.raises(UserError, match="an example has no column 'task'; it has role, source"):
        peers(rewards, EXAMPLES, columns=["task"])


def test_a_baseline_of_each_role_moves_with_its_rewards():
    rae = RoleBaseline(decay=0.5)
    rewards = tensor([[1.0, 1.0], [NAN, 2.0], [0.5, NAN], [0.0, 0.0]])
    # solve: 0 .5 .75, then .625 .3125; propose: 0
    close(rae(rewards, EXAMPLES), tensor([[1.0, 0.5], [NAN, 2.0], [-0.25, NAN], [-0.625, -0.3125]]))
    other = RoleBaseline(decay=0.5)
    other.load_state_dict(rae.state_dict())
    close(other(tensor([[1.0]]), [{"role": "propose"}]), tensor([[0.0]]))  # it is 1 now
    close(rae(tensor([[1.0]]), [{"role": "solve"}]), tensor([[1 - 0.15625]]))
    with pytest.raises(UserError, match="decay=2 must be a number of at least 0 and at most 1"):
        preset("algo/advantage=rae", "algo.advantage.decay=2")
    check_algorithm(Algorithm(rae, clip, 4), 2, 2)
    assert rae.baselines["propose"] == 1  # a check changes nothing
