"""Weights of tokens by prompt, by hand, on two ranks, and in `experiment=scalerl`."""

import math
from types import SimpleNamespace

import numpy as np
import torch
from conftest import compose_config
from hydra.utils import instantiate
from torch import tensor

from grpo.apps.try_algorithm import check_algorithm
from grpo.extras.losses.reductions import prompt_mean
from grpo.extras.selection.samplers import pools
from grpo.extras.selection.selection import WithSignal
from grpo.objectives.loss import token_weights
from grpo.system import distributed

close = torch.testing.assert_close
MASK = tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
SAMPLE = tensor([0, 1, 2, 3, 1])  # the last row is the second of sample 1; sample 3 has nothing to learn from
GROUP = SAMPLE // 2


def test_every_prompt_has_the_same_weight_however_long_its_answers_are():
    """Prompt 0 has 6 tokens in two samples, prompt 1 has 2 in one: 1 / (2 x 6) and 1 / (2 x 2)."""
    close(
        token_weights(MASK, prompt_mean, 9, SAMPLE, group=GROUP),
        tensor([1 / 12, 1 / 12, 1 / 4, 0.0, 1 / 12])[:, None] * MASK,
    )
    close(token_weights(MASK, "token", 9, SAMPLE), MASK / 8)  # where the longer prompt has three times the weight
    close(token_weights(MASK, "sequence", 9, SAMPLE)[:, 0], tensor([1 / 9, 1 / 9, 1 / 6, 0.0, 1 / 9]))
    first = MASK & (SAMPLE < 2)[:, None]  # a prompt without tokens is none of the prompts
    close(token_weights(first, prompt_mean, 9, SAMPLE, group=GROUP + 20), first / 6)
    none = token_weights(MASK[:0], prompt_mean, 9, SAMPLE[:0], group=GROUP[:0])  # of a rank without a row
    assert none.shape == (0, 4)


def test_a_prompt_whose_samples_are_on_two_ranks_is_one_prompt(monkeypatch):
    whole = token_weights(MASK, prompt_mean, 9, SAMPLE, group=GROUP)
    ranks, sent = (tensor([0, 3]), tensor([1, 2, 4])), []
    monkeypatch.setattr(distributed, "all_gather", lambda items: sent.append(items) or items)
    for rows in ranks:
        token_weights(MASK[rows], prompt_mean, 9, SAMPLE[rows], group=GROUP[rows])
    monkeypatch.setattr(distributed, "all_gather", lambda items: sent[0] + sent[1])
    for rows in ranks:
        close(token_weights(MASK[rows], prompt_mean, 9, SAMPLE[rows], group=GROUP[rows]), whole[rows])


def test_scalerl_makes_the_choices_of_its_paper():
    config = compose_config("experiment=scalerl", "rollout.group_size=4", "output_dir=.")
    check_algorithm(algorithm := instantiate(config.algo), 8, 4, ahead=config.rollout.ahead)
    assert algorithm.reduce is prompt_mean
    logprobs, old = tensor([[-1.0]]), tensor([[-1.0 - 2.0]])
    loss, _ = algorithm.surrogate(ratio=(logprobs - old).exp(), logprobs=logprobs, advantages=torch.ones(1, 1))
    assert loss.item() == 5.0  # e^2 is cut to 5
    assert (config.rollout.ahead, config.rollout.max_staleness, algorithm.old_policy) == (8, 8, "rollout")
    assert config.model.head_dtype == "float32"
    # rewards (1, 0) and (3, 0): the standard deviation of 0.5, -0.5, 1.5, -1.5 is sqrt(5 / 3), that of the rewards is sqrt(2)
    advantages = algorithm.advantage(tensor([[1.0, 0.0], [3.0, 0.0]]))
    close(advantages[:, 0], tensor([0.5, 1.5]) / (math.sqrt(5 / 3) + 1e-4))
    assert isinstance(instantiate(config.selection), WithSignal)
    weight = {key: value for key, value in config.sampler.weight.items() if not key.startswith("_")}
    asked = SimpleNamespace(solved=np.array([math.nan, 0.0, 0.875, 0.9, 1.0]))
    assert pools(asked, **weight).tolist() == [1, 1, 1, 0, 0]
