"""The forecast of a GPU beside an update on a fake one: tensors without memory, and torch's allocator, simulated."""

import pytest
from helpers.fake_gpu import CONTEXT, MB, Allocator, update


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "size", "again"),
    [
        ("experiment=qwen05b_gsm8k", 8192, False),
        ("experiment=qwen7b_lora", 8192, True),
    ],
)
def test_the_forecast_of_a_gpu_is_within_a_tenth_of_a_fake_one(command, size, again):
    found = update(command.split(), size, again)
    assert found.counted == pytest.approx(found.peak, rel=0.1)
    assert found.reserved + CONTEXT <= found.foreseen <= 1.15 * (found.reserved + CONTEXT)


def test_the_simulated_allocator_keeps_pieces_as_torchs_does():
    """There are three blocks of 30 MB. The second and the third are freed and merged: 60 MB fit there, and 62 do not."""
    allocator = Allocator()
    first = allocator.take(90 * MB)
    assert (allocator.allocated, allocator.reserved) == (90 * MB, 90 * MB)
    allocator.give(*first)
    blocks = [allocator.take(30 * MB) for _ in range(3)]
    assert (allocator.allocated, allocator.reserved) == (90 * MB, 90 * MB)
    allocator.give(*blocks[1])
    allocator.give(*blocks[2])
    again = allocator.take(60 * MB)
    assert (allocator.allocated, allocator.reserved) == (90 * MB, 90 * MB)
    allocator.give(*again)
    allocator.take(62 * MB)
    assert (allocator.allocated, allocator.reserved, allocator.most_allocated) == (92 * MB, 152 * MB, 92 * MB)
    allocator.take(1000)
    assert allocator.reserved == 154 * MB and allocator.allocated == 92 * MB + 1024
