"""Run a command several times beside busy processes, and name the tests that fail in any of the runs.

    python benchmarks/load.py [--load 8] [--times 2] [--seed 0] -- python -m pytest tests/system

The busy processes differ: some compute, some move memory, some start processes, some compute and sleep in turn. They end with
this program, however it ends. Each run's wall and CPU seconds are printed; CPU seconds are the command's, children included.
"""

import argparse
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # as pytest's summary has it
MEGABYTES = 32


def compute(chance: random.Random) -> None:
    sum(range(200_000))


def memory(chance: random.Random) -> None:
    bytes(bytearray(MEGABYTES << 20))


def starts(chance: random.Random) -> None:
    subprocess.run([sys.executable, "-S", "-c", "import json"], check=False)


def bursts(chance: random.Random) -> None:
    end = time.thread_time() + chance.random() / 5
    while time.thread_time() < end:
        pass
    time.sleep(chance.random() / 5)


KINDS = (compute, memory, bursts, starts)


def busy(number: int, seed: int, parent: int) -> None:
    """Do work of one kind until the parent is gone: it may be killed before it can end this process."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_DFL)
    chance = random.Random(f"{seed} {number}")
    while os.getppid() == parent:
        KINDS[number % len(KINDS)](chance)


@contextmanager
def loaded(load: int, seed: int = 0) -> Iterator[None]:
    """Keep so many processes busy during a `with` block."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=busy, args=(i, seed, os.getpid()), daemon=True) for i in range(load)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()


def run(command: list[str]) -> tuple[int, str, float, float]:
    """Run the command; return its exit code, its output, its wall seconds and its CPU seconds."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            raise
        output.seek(0)
        said = output.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(status), said, time.monotonic() - began, used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=8, help="busy processes")
    parser.add_argument("--times", type=int, default=2, help="runs of the command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failures: Counter[str] = Counter()
    bad = 0
    with loaded(options.load, options.seed):
        for number in range(1, options.times + 1):
            code, said, wall, cpu = run(options.command)
            failures.update(set(FAILED.findall(said)))
            bad += code != 0
            last = (said.strip().splitlines() or [""])[-1]
            print(f"{said}\n" * (code != 0), end="")
            print(f"run {number}: exit code {code}, {wall:.0f} s, {cpu:.0f} CPU s: {last}", flush=True)
    for test, count in failures.most_common():
        print(f"{test} failed in {count} of {options.times} runs")
    print(f"{options.times - bad} of {options.times} runs passed beside {options.load} busy processes")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
