"""The reference beside the policy."""

from copy import deepcopy

import torch

from grpo.models.policy import Reference


def test_a_moving_reference_leaves_no_casts_behind(toy_model):
    """Autocast caches a 16-bit copy of each parameter, and does not notice that a parameter has other data meanwhile."""
    reference, halved = Reference(toy_model, moves=True), deepcopy(toy_model)
    with torch.no_grad():
        for weight in [*reference.weights.values(), *halved.parameters()]:
            weight.mul_(0.5)
    ids = torch.tensor([[60, 61, 62]])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before, expected = toy_model(ids).logits, halved(ids).logits
        with reference.model() as model:
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(toy_model(ids).logits, before)
