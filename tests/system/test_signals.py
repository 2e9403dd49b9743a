"""A signal is heard while the main thread is blocked in C, or in code that swallows exceptions: real processes and signals.

The calls that block would last for an hour, so an end shows that they were not waited for.
"""

import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from grpo.system.errors import StopError
from grpo.system.stopping.stop import Stop

BEGIN = """
import ctypes, time
from grpo.apps.leave_early import leave_early
from grpo.system.stopping.stop import Stop
def in_c():
    mutex, libc, words = (ctypes.c_char * 64)(), ctypes.CDLL(None), ["begins"]
    libc.pthread_mutex_lock(mutex)
    while True:
        try:  # for ever: it goes on after a signal, and no handler of Python's runs
            if words:
                print(words.pop(), flush=True)
            libc.pthread_mutex_lock(mutex)
        except BaseException:  # of a signal that came before the lock
            pass
"""


def ended(program: str, *numbers: int) -> tuple[int, str, str]:
    """Return exit code and streams of a program that gets signals after its first line."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", BEGIN + program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stdout.readline()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.5)
    out, err = process.communicate(timeout=300)
    return process.returncode, first + out, err


def test_a_place_with_nothing_to_save_ends_although_the_main_thread_is_in_c():
    program = (
        "stop = Stop()\nstop.listen()\nwith stop.allowed('the same command begins again', saves=False):\n    in_c()"
    )
    code, _, said = ended(program, signal.SIGTERM)
    heard, *_, last = said.splitlines()
    assert code == 75 and heard == "SIGTERM: the run ends now; the same command begins again"
    assert last == "stopped by SIGTERM; the same command begins again"


def test_a_program_that_loads_ends_although_its_main_thread_is_in_c():
    code, _, said = ended("leave_early('training')\nin_c()", signal.SIGTERM)
    assert code == 75 and said == "stopped by SIGTERM before the training: the same command begins again\n"


@pytest.mark.slow
def test_an_exception_that_a_library_swallows_is_raised_again():
    program = """
stop = Stop()
stop.listen()
try:
    with stop.allowed():
        try:
            print("begins", flush=True)
            time.sleep(3600)
        except ValueError:
            print("swallowed", flush=True)
        time.sleep(3600)
except ValueError as error:
    print(error)
"""
    code, out, said = ended(program, signal.SIGUSR1)
    line = "stopped by SIGUSR1; the same command with resume=auto continues the run"
    assert code == 0 and out.splitlines() == ["begins", "swallowed", line]
    assert said == "SIGUSR1: the run ends now; the same command with resume=auto plays the rollout again\n"


@pytest.mark.slow
def test_a_second_signal_ends_a_process_that_is_in_c():
    program = "stop = Stop()\nstop.listen()\nwith stop.allowed():\n    in_c()"
    code, _, said = ended(program, signal.SIGTERM, signal.SIGUSR1)
    # by the handler if the main thread was not there yet
    assert code == -signal.SIGUSR1 or (code == 128 + signal.SIGUSR1 and said.endswith("a second signal, SIGUSR1\n"))


def test_a_group_of_exceptions_is_no_disguise():
    stop = Stop()
    with pytest.raises(StopError, match="SIGTERM"), stop.allowed():
        raise ExceptionGroup("of a library", [ExceptionGroup("within", [StopError("SIGTERM")])])
    with pytest.raises(ExceptionGroup, match="another"), stop.allowed():
        raise ExceptionGroup("another", [ValueError("x")])


def test_a_server_that_does_not_answer_holds_nothing_up():
    """It accepts the connection, and the engine would wait an hour for its answer."""
    program = """
import asyncio, socket
from grpo.extras.vllm_server.http import RemoteServer
silent, stop = socket.create_server(("127.0.0.1", 0)), Stop()
server = RemoteServer(f"http://127.0.0.1:{silent.getsockname()[1]}", 3600, "")
stop.listen()

async def ask():
    asking = asyncio.ensure_future(server.ask("/health", {}))
    await asyncio.sleep(0)
    print("begins", flush=True)
    await asking

try:
    with stop.allowed():
        asyncio.run(ask())
except ValueError as error:
    print(error)
"""
    code, out, _ = ended(program, signal.SIGTERM)
    line = "stopped by SIGTERM; the same command with resume=auto continues the run"
    assert code == 0 and out.splitlines() == ["begins", line]
