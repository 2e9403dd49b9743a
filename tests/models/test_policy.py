"""The reference beside the policy."""

import torch

from grpo.models.policy import Reference


def test_a_moving_reference_leaves_no_casts_behind(toy_model):
    """Autocast keeps a 16-bit copy of each parameter, and does not see that a parameter has other data meanwhile."""
    reference = Reference(toy_model, moves=True)
    with torch.no_grad():
        for weight in reference.weights.values():
            weight.mul_(0.5)
    ids = torch.tensor([[60, 61, 62]])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = toy_model(ids).logits
        with reference.model() as model:
            other = model(ids).logits
        after = toy_model(ids).logits
    assert torch.equal(before, after) and not torch.equal(before, other)
