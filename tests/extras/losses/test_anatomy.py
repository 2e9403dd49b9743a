"""The loss and the gradient of one token against its ratio: numbers worked by hand."""

import pytest
import torch
from conftest import preset

from grpo.extras.losses.anatomy import against_ratio


@pytest.mark.parametrize(
    ("algo", "advantage", "ratio", "loss", "gradient"),
    [
        ("grpo", 1, 1.5, -0.2, 0.0),  # -1.2 from -1
        ("grpo", 1, 0.5, 0.5, -0.5),
        ("grpo", -1, 1.5, 0.5, 1.5),  # no bound on this side
        ("grpo", -1, 0.5, -0.2, 0.0),
        ("dapo", 1, 1.25, -0.25, -1.25),  # within 1.28
        ("rloo", 1, 2.0, -0.6931, -1.0),  # -log r
        ("cispo", 1, 2.0, 1.6137, -2.0),  # -2 (log 2 - 3) from 3: the ratio is a weight
        ("rolo", -1, 3.0, 2.0, 3.0),
        ("gspo", 1, 0.5, 0.6697, -0.9330),  # ten tokens of s = 0.5^(1/10), each with a tenth of its gradient
        ("ppo_sequence", 1, 0.5, 5.0, -5.0),  # ten tokens of the product
        ("atropos", 1, 1.5, -0.2 + 0.1 * (2 / 3 - 1 + 0.4055), 0.1 * (1 - 2 / 3)),  # the KL acts beyond the clip
    ],
)
def test_the_loss_and_gradient_of_one_token(algo, advantage, ratio, loss, gradient):
    found = against_ratio(preset(f"algo={algo}"), torch.tensor([ratio]), advantage)
    assert torch.cat(found).tolist() == pytest.approx([loss, gradient], abs=2e-4)


def test_tokens_that_move_together():
    loss, gradient = against_ratio(preset("algo=ppo_sequence"), torch.tensor([1.01]), 1, together=True)
    assert loss.item() == pytest.approx(-10 * (1.01**10 - 1), abs=1e-3)
    assert gradient.item() == pytest.approx(-10 * 1.01**10, abs=1e-3)
