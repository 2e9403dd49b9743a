"""`pytest --again` runs a failed test once more, alone. One that then passes is FLAKY: printed, and no failure of the suite."""

import os
import subprocess
import sys

import pytest

MOST = 10  # tests; more than these are no matter of chance


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again", action="store_true", help="run a failed test again, alone; if it then passes, tell and go on"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session):
    ran = yield
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    reports = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, [])]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    if not session.config.option.again or len(failed) > MOST:
        return ran
    for test in failed:
        where = ("-c", str(session.config.inipath or os.devnull), f"--rootdir={session.config.rootpath}")
        words = (sys.executable, "-m", "pytest", *where, "-m", "", "-p", "no:cacheprovider", test)
        alone = subprocess.run(words, cwd=session.config.rootpath, capture_output=True, text=True)
        if alone.returncode == 0:
            for kind in ("failed", "error"):
                of_test = [report for report in reporter.stats.get(kind, []) if report.nodeid == test]
                reporter.stats[kind] = [report for report in reporter.stats.get(kind, []) if report not in of_test]
                reporter._add_stats("flaky", [(report, alone.stdout) for report in of_test])
                session.testsfailed -= len(of_test)
    return ran


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter) -> None:
    for report, alone in terminalreporter.stats.get("flaky", []):
        terminalreporter.section(f"FLAKY {report.nodeid}", red=True)
        for text in (report.longreprtext, *(f"{name}\n{text}" for name, text in report.sections), "Alone:", alone):
            terminalreporter.line(text)
