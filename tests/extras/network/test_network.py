"""Ports that are taken, and processes that end with their parent."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from grpo.extras.network.answers import addresses, reading
from grpo.extras.network.child import start, stop
from grpo.extras.network.ports import check_port, family, holder
from grpo.system.errors import UserError

WAITS = [sys.executable, "-c", "import time\nprint('begun', flush=True)\ntime.sleep(600)"]


def test_a_port_that_is_taken_names_its_holder():
    """Two processes listen: each port has its own."""
    other = "import socket, time\ns = socket.create_server(('127.0.0.1', 0))\n"
    other += "print(s.getsockname()[1], flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE, text=True) as process:
        try:
            theirs = int(process.stdout.readline())
            with socket.create_server(("127.0.0.1", 0)) as ours:
                mine = ours.getsockname()[1]
                assert f"(pid {os.getpid()}, " in holder(mine) and f"(pid {process.pid}, " in holder(theirs)
                with pytest.raises(UserError, match=rf"port={theirs} is held by .*pid {process.pid}"):
                    check_port("127.0.0.1", theirs)
            check_port("127.0.0.1", mine)  # it is free again
        finally:
            process.kill()
    assert [family(host) for host in ("::1", "fe80::2", "127.0.0.1", "host")] == [
        *[socket.AF_INET6] * 2,
        *[socket.AF_INET] * 2,
    ]


def test_where_nobody_can_listen_is_refused_for_its_own_reason():
    check_port("127.0.0.1", 0)  # any that is free
    with pytest.raises(UserError, match=r"^host= is empty"):  # it would be every machine
        check_port("", 0)
    with pytest.raises(UserError, match=r"^host=203\.0\.113\.1 port=0: no program can listen there"):
        check_port("203.0.113.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert f"(pid {os.getpid()}, " in holder(server.getsockname()[1])
        assert f"(pid {os.getpid()}, " not in holder(client.getsockname()[1])  # a client does not listen


def test_addresses_are_named_once_and_an_answer_without_a_part_is_one_line():
    assert addresses(["http://a:1/", "http://b:1", "http://a:1"], "urls") == ["http://a:1", "http://b:1"]
    line = r"^http://a:1 answers what cannot be read, without 'choices': \{\}$"
    with pytest.raises(UserError, match=line), reading("http://a:1", answer := {}, UserError):
        answer["choices"]


def test_addresses_without_a_host_are_refused_and_a_mistake_of_the_user_stays_as_it_is():
    for wrong in ([], ["http://"], ["http://a:1", "b:1"]):
        with pytest.raises(UserError, match=r"^urls=\[.*\] must name servers, as \[http://HOST:PORT\]$"):
            addresses(wrong, "urls")
    with pytest.raises(UserError, match=r"^the limit is too low$"), reading("http://a:1", {}, UserError):
        raise UserError("the limit is too low")


def test_commands_have_sessions_of_their_own_and_have_ended_when_stop_returns():
    guards = [start(WAITS, stdout=subprocess.PIPE) for _ in range(2)]
    assert [guard.stdout.readline() for guard in guards] == [b"begun\n"] * 2
    children = [child for guard in guards for child in psutil.Process(guard.pid).children()]
    assert len(children) == 2 and os.getsid(0) not in {os.getsid(process.pid) for process in [*guards, *children]}
    stop(iter(guards))
    assert all(guard.poll() is not None for guard in guards)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.slow
def test_a_command_that_ignores_signals_ends_although_its_guard_is_asked_twice():
    """So has another one, whose guard is not asked, when `stop` returns."""
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('begun', flush=True)\ntime.sleep(600)"
    guard, other = guards = [start([sys.executable, "-c", deaf], stdout=subprocess.PIPE) for _ in range(2)]
    assert [each.stdout.readline() for each in guards] == [b"begun\n"] * 2
    children = [child for each in guards for child in psutil.Process(each.pid).children()]
    guard.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(1)
    guard.terminate()
    stop([other])
    assert other.poll() is not None
    assert guard.wait(60) == 1
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
