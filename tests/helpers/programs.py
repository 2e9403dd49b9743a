"""Commands as a user types them, without the seconds in which each would import torch.

A server imports the libraries once, and each command is a fork of it: it has an exit code, signals and streams of its own.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from conftest import ROOT

from helpers.appendices import MODULES

IMPORTED = "lightning pandas torch.utils.tensorboard grpo.training.module train eval"
IMPORTED += "".join(
    f" {name}" for name in ("grpo.extras.report.run_plots", "grpo.extras.serve.api") if not MODULES.match(name)
)
started_by: int | None = None  # the process that started the server


def server() -> multiprocessing.context.BaseContext:
    """Return the context whose processes are forks of the server. Forks of the tests share one that was there before them."""
    global started_by
    context = multiprocessing.get_context("forkserver")
    if started_by in (None, os.getpid()):
        started_by = os.getpid()
        context.set_forkserver_preload(IMPORTED.split())
        with contextlib.chdir(ROOT):
            forkserver.ensure_running()
    else:
        forkserver._forkserver.ensure_running = lambda: None  # it would wait for a process that is no child of a fork
    return context


def start(
    *words: str, out: Path, err: Path, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start `python WORDS` in a folder. Its streams are appended to two files."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    process = server().Process(target=run, args=(words, out, err, folder, environment))
    process.start()
    return process


def command(*words: str, seconds: float = 900, **more) -> subprocess.CompletedProcess:
    """Run `python WORDS` to its end."""
    with tempfile.TemporaryDirectory() as streams:
        out, err = Path(streams, "out"), Path(streams, "err")
        process = start(*words, out=out, err=err, **more)
        process.join(seconds)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def typed(lines: list[str], file: str) -> tuple[str, list[int]]:
    """Run commands one after another, and beside the rest those that end with &, which get a Ctrl-C at the end.

    Returns what they printed, which is in the file, and the exit codes. ROOT and PORT stand for the project and a free port."""
    codes, beside = [], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Path(file).write_text("")
    for line in lines:
        words = shlex.split(line.replace("ROOT", str(ROOT)).replace("PORT", str(port)).removesuffix("&"))
        given = dict(word.split("=", 1) for word in words[: words.index("python")])
        environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(ROOT)]), **given}
        streams = {"out": Path(file), "err": Path(file)}
        child = start(*words[len(given) + 1 :], **streams, folder=Path.cwd(), environment=environment)
        if line.endswith("&"):
            beside.append(child)
        else:
            child.join(900)
            child.kill()
            codes.append(child.exitcode)
    for child in beside:
        os.kill(child.pid, signal.SIGINT)
        child.join(300)
        child.kill()
    return Path(file).read_text(), codes


def run(words: tuple[str, ...], out: Path, err: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Do the work, and tell what it took, under the name of the test whose command it is."""
    test = environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if covered := sys.modules.get("coverage"):  # benchmarks/finds.py
        covered.Coverage.current().switch_context(test)
    if fault := environment.get("PLANTED_FAULT"):
        sys.path.insert(0, str(ROOT / "benchmarks"))
        importlib.import_module("mutants").planted(fault)
    try:
        work(words, out, err, folder, environment)
    finally:
        if file := environment.get("COSTS_OF_COMMANDS"):
            with open(file, "a") as lines:
                lines.write(json.dumps({"test": test, "when": "command", "cpu": round(sum(os.times()[:4]), 4)}) + "\n")


def work(words: tuple[str, ...], out: Path, err: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Do in this process what a shell would start a process for."""
    for number, file in ((1, out), (2, err)):
        with open(file, "a") as stream:
            os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *environment["PYTHONPATH"].split(os.pathsep)]
    if words[0] == "-c":  # may ask what is imported
        sys.exit(subprocess.run([sys.executable, *words]).returncode)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        file = words[0] if Path(words[0]).exists() else str(ROOT / words[0])
        sys.argv = [file, *words[1:]]
        runpy.run_path(file, run_name="__main__")
