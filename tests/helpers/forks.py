"""`pytest --forks 2` runs the tests in two forks of the process that collected them, so what tests import is imported once.

The unit of work is a file: whoever is free takes the next one. A fork that dies costs the test that killed it, not the rest.
A file that is done, or a test that failed, is a line at once, so a run that is cut off has said what it had run.

Many tests wait for programs, so while a quarter of the machine is idle there are up to MORE forks beside those.
"""

import gc
import os
import signal
import time
import traceback
from collections import Counter, deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest

MORE = 2  # forks beside those that were asked for
LOOK = 10  # seconds between two looks at what is idle
# for the garbage collector: by Python's own numbers it took a seventh of the time of tests/apps and tests/config
RARELY = 20_000, 10, 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, help="run the files of tests in this many forks, in more while idle"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks:
        gc.set_threshold(*RARELY)
    signal.signal(signal.SIGTERM, cut_off)  # pytest then prints what was run so far


def cut_off(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt("cut off by SIGTERM")


class Fork:
    """A fork, the tests of its file that it has yet to run, and the connection to it."""

    def __init__(self, session: pytest.Session, number: int, others: list[Connection]):
        self.connection, theirs = Pipe()
        self.left: deque[pytest.Item] = deque()
        self.pid = os.fork()
        if not self.pid:
            for connection in (self.connection, *others):
                connection.close()  # else a fork would not see that its parent is gone
            serve(session, number, theirs)
        theirs.close()

    def take(self, items: list[pytest.Item]) -> None:
        self.left = deque(items)
        self.connection.send([item.nodeid for item in items])

    def end(self) -> int:
        """Ask the fork to end, wait for it, and return its exit code, or the negative number of its signal."""
        self.connection.close()
        for _ in range(300):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)  # a test does not let it end
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if not config.option.forks or config.option.collectonly or session.testsfailed:
        return None
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    forks: dict[Connection, Fork] = {}
    outcomes: dict[Path, Counter[str]] = {items[0].path: Counter() for items in files}
    started, most, looked = 0, config.option.forks, time.monotonic()
    psutil.cpu_percent()  # the next call is about the time since this one
    config._tmp_path_factory.getbasetemp()  # whoever asks first empties the folder of --basetemp
    gc.collect()
    gc.freeze()  # what was imported is never garbage, and a million objects take a second to look at

    def ended(fork: Fork) -> None:
        """A test of the fork is over. A line says what became of the file if it was the last."""
        file = fork.left.popleft().path
        if not fork.left:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes[file].items())
            tell(config, f"{file.relative_to(session.path)}: {counts}")

    try:
        while True:
            go_on = not (session.shouldfail or session.shouldstop)
            if time.monotonic() - looked > LOOK:
                most, looked = wanted(psutil.cpu_percent(), len(forks), config.option.forks), time.monotonic()
            while files and go_on and len(forks) < most:
                fork = Fork(session, started, list(forks))
                forks[fork.connection] = fork
                started += 1
                fork.take(files.popleft())
            if not forks:
                break
            for connection in wait(list(forks), LOOK):
                fork = forks[connection]
                try:
                    said = connection.recv()
                except (EOFError, ConnectionResetError):
                    del forks[connection]
                    code = fork.end()
                    if fork.left:  # it died in the first of these
                        outcomes[fork.left[0].path]["failed"] += 1
                        report(config, death(fork.left[0], code))
                        ended(fork)
                        files.extendleft([list(fork.left)] if fork.left else [])
                    continue
                if said is not None:
                    report(config, config.hook.pytest_report_from_serializable(config=config, data=said))
                    if said["when"] == "call" or said["outcome"] != "passed":
                        outcomes[fork.left[0].path][said["outcome"]] += 1
                    if said["when"] == "teardown":
                        ended(fork)
                elif files and go_on and len(forks) <= most:
                    fork.take(files.popleft())
                else:
                    del forks[connection]
                    fork.end()
    finally:
        for fork in forks.values():
            os.kill(fork.pid, signal.SIGTERM)
        for fork in forks.values():
            fork.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def wanted(busy: float, running: int, asked: int) -> int:
    """Return how many forks there may be: one more than there are while a quarter of the machine is idle, one fewer if none is.

    `busy` is in percent of all cores.
    """
    return min(max(running + (busy < 75) - (busy > 97), asked), asked + MORE)


def report(config: pytest.Config, report: pytest.TestReport) -> None:
    if report.when == "setup":
        config.hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
    config.hook.pytest_runtest_logreport(report=report)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
        tell(config, f"FAILED {report.nodeid}: {why}", red=True)
    if report.when == "teardown":
        config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


def tell(config: pytest.Config, text: str, **markup: bool) -> None:
    config.get_terminal_writer().write(f"{text}\n", flush=True, **markup)


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    if config.option.forks and (report.when == "call" or report.skipped) and not hasattr(report, "wasxfail"):
        return report.outcome, "", "FAILED" if report.failed else ""  # a line for a file stands for its letters
    return None


def death(item: pytest.Item, code: int) -> pytest.TestReport:
    text = f"{item.nodeid} ended the process that ran it: exit code {code}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call", [])


def serve(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run the files that come through the connection, and send back a report of each phase, then None. Does not return."""
    config, items = session.config, {item.nodeid: item for item in session.items}
    try:
        config.pluginmanager.unregister(name="terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are shared with the other forks
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.register(Told(config, connection))
        factory = config._tmp_path_factory
        factory._basetemp = factory.getbasetemp() / f"fork{number}"
        factory._basetemp.mkdir()
        while True:
            file = [items[name] for name in connection.recv()]
            for item, following in zip(file, [*file[1:], session], strict=True):  # the session's fixtures stay
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Told:
    """Sends a fork's reports to its parent."""

    def __init__(self, config: pytest.Config, connection: Connection):
        self.config, self.connection = config, connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.connection.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
