"""Calls of user code: time limits, threads that hang, coroutines, and which calls are slow."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from grpo.system import exits
from grpo.system.calls import LOOK, Calls, awaited


async def running_loop():
    return asyncio.get_running_loop()


def test_a_thread_that_hangs_is_replaced():
    async def six():
        calls, release = Calls(threads=2), threading.Event()

        def work(place):
            return release.wait(60) if place < 3 else place

        found = await asyncio.gather(*(calls.run(place, 0.2 if place < 3 else 60, work, place) for place in range(6)))
        release.set()
        return found

    found = asyncio.run(six())
    assert [str(given) for given in found] == ["it took longer than 0.2 s"] * 3 + ["3", "4", "5"]


def test_a_coroutine_has_what_its_call_has_left_of_the_time():
    """The call computes for 0.9 s of 1 s, and its coroutine waits for 0.95 s."""

    def work():
        time.sleep(0.9)
        return asyncio.sleep(0.95, "done")

    async def one(seconds):
        return await Calls(threads=1).run(0, seconds, work)

    async def both():
        return await asyncio.gather(one(1), one(60))

    late, done = asyncio.run(both())
    assert str(late) == "it took longer than 1 s" and done == "done"


def test_what_a_call_raises_is_its_outcome():
    async def three():
        calls = Calls(threads=1)
        return await asyncio.gather(
            calls.run(1, 60, sys.exit, 3), calls.run(2, 60, int, "x"), calls.run(3, 60, running_loop)
        )

    left, wrong, loop = asyncio.run(three())
    assert isinstance(left, SystemExit) and isinstance(wrong, ValueError) and loop is awaited(running_loop())


def test_a_thread_that_a_function_has_started_does_not_end_the_run_as_if_it_had_finished(capsys):
    codes: list[int] = []
    with exits.seen("the reward function 'mine'"):
        thread = threading.Thread(target=exits._ended, args=(os.getpid(), codes.append, 0))
        thread.start(), thread.join()
    assert codes == [1]
    told = capsys.readouterr().err  # it also names what the threads of other tests still run
    assert told.startswith("error: os._exit was called while ") and "the reward function 'mine'" in told


def test_a_fork_that_returns_ends():
    def forks():
        child = os.fork()  # the child returns 0
        return child and os.waitpid(child, 0)[1]

    async def status():
        return await Calls(1).run(1, 60, forks)

    assert asyncio.run(status()) != 0  # also if a C library, whose threads a child lacks, has ended it


def test_a_loop_that_has_a_result_to_tell_is_not_taken_for_blocked():
    """One coroutine finishes just when another is cancelled, once both have begun: the clock of the calls' loop then jumps."""
    before, given_up, begun = awaited(running_loop()), asyncio.Event(), threading.Semaphore(0)

    async def slow():
        try:
            begun.release()
            await asyncio.sleep(3600)
        finally:
            given_up.set()

    async def quick():
        begun.release()
        return await given_up.wait()

    async def both():
        calls, loop = Calls(threads=4), asyncio.get_running_loop()
        first, second = (asyncio.create_task(calls.run(i, (60, 600)[i], (slow, quick)[i])) for i in range(2))
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        now = loop.time
        loop.time = lambda: now() + 120
        return await second, await first

    told, late = asyncio.run(both())
    assert isinstance(late, TimeoutError) and told is True
    assert awaited(running_loop()) is before


def looks(calls: Calls, keys: set, until: float, wanted: set | None = None) -> dict:
    """Return the seconds after which each call was found to be slow; ends when the wanted ones (all by default) are found."""
    begun, found = time.monotonic(), {}
    while time.monotonic() - begun < until and (wanted or keys) - found.keys():
        time.sleep(LOOK)
        found |= dict.fromkeys(calls.slow(keys - found.keys(), []), time.monotonic() - begun)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's statistics of threads")
def test_who_waits_is_slow_and_who_waits_for_a_core_is_not():
    """Four processes compete for the cores. Each call computes for at most 0.1 s, or waits for something outside."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]

    def compute():
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    async def all_calls(release, found):
        calls = Calls(threads=16)
        quick = [calls.run(i, 60, compute) for i in range(12)]
        waiting = calls.run("waits", 60, release.wait)
        watch = asyncio.to_thread(looks, calls, {*range(12), "waits"}, 120, {"waits"})
        done = asyncio.gather(*quick, waiting)
        found.update(await watch)
        release.set()
        await done

    found: dict = {}
    try:
        asyncio.run(all_calls(threading.Event(), found))
    finally:
        for process in others:
            process.kill()
    assert found.keys() == {"waits"}


def test_who_computes_for_long_is_slow():
    release = threading.Event()

    def burn():
        while not release.is_set():
            pass

    async def one():
        calls = Calls(threads=1)
        task = asyncio.create_task(calls.run("burns", 60, burn))
        found = await asyncio.to_thread(looks, calls, {"burns"}, 60)
        release.set()
        await task
        return found

    assert asyncio.run(one()).keys() == {"burns"}
