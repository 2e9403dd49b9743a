"""grpo.prefetch: everything that a run reads is there afterwards, without network."""

import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import EXAMPLES, ROOT, compose_config

from grpo.extras.demo.prefetch import main
from grpo.system.errors import MissingRows, UserError
from train import train

TASK = ["task=gsm8k", f"task.path={EXAMPLES}", "model=path"]


def test_what_is_on_this_machine_needs_no_hub(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/my cache")
    words = [*TASK, f"model.path={toy}", "task.train_limit=2"]
    second = ["+task@eval.sets.second=gsm8k", f"eval.sets.second.task.path={EXAMPLES}"]
    main([*words, *second])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["train: 2 examples", "test: 3 examples", "second: 3 examples", f"model: {toy}"]
    command = f"HF_HOME='/my cache' HF_HUB_OFFLINE=1 python train.py {' '.join([*words, *second])}"
    assert lines[4:] == [f"without network: {command}"]
    shutil.copytree(toy, tmp_path / "toy")
    (tmp_path / "toy" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no model that transformers can load"):
        main([*TASK, f"model.path={tmp_path}/toy"])


@pytest.mark.parametrize("missing", [["model.path=org/nothing"], ["model.path=x", "task.path=org/nothing"]])
def test_what_the_hub_does_not_give_is_one_line(missing):
    """Tests run with HF_HUB_OFFLINE=1, as without network."""
    with pytest.raises(UserError, match=r"path=org/nothing is n.* hub") as error:
        main([*TASK, *missing])
    assert "\n" not in str(error.value)


def test_a_forecast_needs_no_rows(toy, tmp_path, caplog):
    words = ["task=gsm8k", "task.path=org/nothing", "model=path", f"output_dir={tmp_path}"]
    with pytest.raises(MissingRows, match=r"give task\.path=FOLDER with a train\.jsonl and a test\.jsonl$"):
        train(compose_config(*words, f"model.path={toy}"))
    caplog.set_level("INFO")
    train(compose_config(*words, f"model.path={toy}", "debug=forecast", "trainer=cpu"))
    assert "this forecast is for prompts of 256 tokens instead" in caplog.text and "memory: " in caplog.text


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the files of one folder as the model org/toy."""

    folder: Path

    def do_GET(self) -> None:
        file = self.folder / self.path.removeprefix("/org/toy/resolve/main/")
        there = self.path.startswith("/org/toy/resolve/main/") and file.is_file()
        body = file.read_bytes() if there else b"{}"
        self.send_response(200 if there else 404)
        for name, value in {
            "ETag": f'"{file.name}"' if there else None,
            "X-Repo-Commit": "1" * 40,
            "X-Error-Code": None if there else "EntryNotFound",
            "Content-Length": len(body),
        }.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None: ...


@pytest.mark.slow
def test_a_model_of_a_hub_is_there_without_network(toy, tmp_path):
    """A small hub on the loopback address; afterwards it is gone, and the same command reads the cache."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OfToy", (Hub,), {"folder": toy}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.executable, "-m", "grpo.prefetch", *TASK, "model.path=org/toy"]
    common = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}

    def run(offline: str) -> subprocess.CompletedProcess:
        given = common | {"HF_HUB_OFFLINE": offline}
        return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)

    fetched = run("0")
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout.endswith(f"HF_HUB_OFFLINE=1 python train.py {' '.join(TASK)} model.path=org/toy\n")
    server.shutdown()
    server.server_close()
    after = run("1")
    assert (after.returncode, after.stdout) == (0, fetched.stdout), after.stderr
