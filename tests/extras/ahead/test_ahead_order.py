"""Which groups an update takes: numbers worked by hand."""

import random

from grpo.extras.ahead.order import Waiting, for_update


def group(r: int, place: int, finished: bool = True, deadline: int | None = None) -> Waiting:
    return Waiting((r, place), finished, deadline)


def test_the_oldest_finished_groups_come_first():
    waiting = [group(2, 0), group(1, 1), group(0, 1, finished=False), group(1, 0)]
    assert for_update(waiting, 1, 2) == [(1, 0), (1, 1)]
    assert for_update(waiting, 1, 3) == [(1, 0), (1, 1), (2, 0)]
    assert for_update([group(0, 0), group(0, 1, False)], 0, 2) is None  # one is missing
    assert for_update([group(5, 0)], 5, 2) == [(5, 0)]  # the end of a run that has no more
    assert for_update([], 5, 2) is None


def test_an_update_waits_for_groups_that_are_due():
    """Update 3 may be the last for (1, 0), so it waits for it, however many others are finished."""
    others = [group(2, 0, deadline=5), group(2, 1, deadline=5), group(3, 0, deadline=6)]
    assert for_update([group(1, 0, False, 3), *others], 3, 2) is None
    assert for_update([group(1, 0, False, 4), *others], 3, 2) == [(2, 0), (2, 1)]
    assert for_update([group(1, 0, True, 3), *others], 3, 2) == [(1, 0), (2, 0)]
    late = [group(0, 0, True, 1), group(0, 1, True, 1), group(1, 0, True, 1)]
    assert for_update([*late, *others], 3, 2) == [(0, 0), (0, 1)]  # later than any bound: the oldest first


def test_an_update_leaves_no_more_than_the_next_ones_can_take():
    """Four groups are due by update 4, and updates 3 and 4 take two each: update 3 must take two of the four, not (3, 0)."""
    due = [group(1, 0, False, 4), group(1, 1, False, 4), group(2, 0, True, 4), group(2, 1, True, 4)]
    assert for_update([*due, group(3, 0, True, 9)], 3, 2) == [(2, 0), (2, 1)]
    due[2] = group(2, 0, False, 4)
    assert for_update([*due, group(3, 0, True, 9)], 3, 2) is None


def test_no_group_is_ever_learned_from_late():
    """A run of 30 updates of 4 groups, 3 rollouts ahead, at most 5 versions old. Groups take random numbers of updates; the
    update waits where `for_update` says so, and then the next group is finished."""
    rng, ahead, bound, count, learned = random.Random(0), 3, 5, 4, []
    flying: dict[tuple[int, int], int] = {}  # the version at which each group began
    finished: set[tuple[int, int]] = set()
    issued = waits = 0
    for update in range(30):
        while issued < min(update + ahead + 1, 30):
            flying |= {(issued, place): update for place in range(count)}
            issued += 1
        finished |= {key for key in flying if rng.random() < 0.3}
        while True:
            waiting = [Waiting(key, key in finished, begun + bound) for key, begun in flying.items()]
            if (keys := for_update(waiting, update, count)) is not None:
                break
            finished.add(rng.choice(sorted(flying.keys() - finished)))
            waits += 1
        assert len(keys) == count and all(update - flying.pop(key) <= bound for key in keys)
        finished -= {*keys}
        learned += keys
    assert sorted(learned) == [(r, place) for r in range(30) for place in range(count)] and waits > 10
    assert learned != sorted(learned)
