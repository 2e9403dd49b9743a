"""The shapes that comments of TokenBatch and Scores promise are held in every test: each letter has one value."""

import pytest
import torch
from helpers.shapes import noted

from grpo.objectives.batch import Scores, TokenBatch


def batch(**changed):
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    fields = {
        "ids": ids,
        "attention_mask": ids,
        "mask": mask,
        "rollout_logprobs": torch.zeros(2, 3),
        "sample": ids[:, 0],
    }
    return TokenBatch(**fields | changed)


def test_each_tensor_has_a_comment_with_its_shape():
    fields = {
        name for cls in (Scores, TokenBatch) for name, kind in cls.__annotations__.items() if "Tensor" in str(kind)
    }
    assert fields == {*noted(Scores), *noted(TokenBatch)}
    assert noted(TokenBatch)["ids"] == (["B", "P+C"], "int64") and noted(Scores)["parts"] == (["N", "G"], "")


@pytest.mark.parametrize("name, wrong", [
    ("advantages", torch.zeros(2, 4)), ("advantages", torch.zeros(2)), ("turn", torch.zeros(2, 3)),
    ("sample", torch.zeros(3, dtype=torch.int64)), ("mask", torch.ones(2, 3)),
    ("attention_mask", torch.ones(2, 4, dtype=torch.int64)),
])  # fmt: skip
def test_a_wrong_shape_or_type_is_found(name, wrong):
    batch()
    with pytest.raises(AssertionError, match=name):
        batch(**{name: wrong})
