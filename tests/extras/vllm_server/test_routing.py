"""Which server gets which request, without servers."""

from grpo.extras.vllm_server.routing import BLOCK, Routes

A, B, C = [1] * 5, [2] * 5, [3] * 5


def taken(routes: Routes, servers: str) -> list[int]:
    return [routes.take(server) for server in servers]


def test_a_group_stays_on_one_server_until_another_would_be_idle():
    routes = Routes([A, A, A, B, B, B], {})
    assert taken(routes, "xyxyxy") == [0, 3, 1, 4, 2, 5]
    routes = Routes([A, A, A, A, B, C], {})
    assert taken(routes, "xyzxyz") == [0, 4, 5, 1, 2, 3]  # y and z have room, and only A is left
    assert not routes.waiting


def test_a_request_that_failed_goes_to_whoever_has_room():
    routes = Routes([A, A], {})
    assert taken(routes, "xx") == [0, 1]
    routes.put(1)
    assert taken(routes, "y") == [1]


def test_the_next_turn_goes_where_the_last_one_was():
    long, homes = [7] * BLOCK, {}
    first = Routes([long, long], homes)
    for server, i in zip("xy", taken(first, "xy"), strict=True):  # one slot each, so y takes the second sample
        first.done(i, [i] * BLOCK, server)
    after = [[*long, *[i] * BLOCK, 9] for i in (1, 0)]
    assert taken(Routes(after, homes), "xy") == [1, 0]
    assert taken(Routes(after, {}), "xy") == [0, 1]
    assert taken(Routes([[7] * (BLOCK - 1), []], homes), "yx") == [0, 1]  # nobody has read these
