"""Things in pieces."""

from grpo.system.memory import in_pieces


def test_pieces_keep_the_order_and_only_a_large_item_exceeds_the_bound():
    assert list(in_pieces([2, 3, 1, 9, 4, 4, 5], int, 6)) == [[2, 3, 1], [9], [4], [4], [5]]
    assert list(in_pieces([], int, 6)) == []
