"""Shows all runs of a folder in a browser. A page is made when it is asked for, so it is of that moment."""

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from grpo.extras.report import dictionary, document, page
from grpo.extras.report.run import minute
from grpo.extras.report.runs import arms
from grpo.runs.run import Run
from grpo.system.errors import UserError

REFRESH = 10.0  # seconds after which pages load themselves again


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of all runs, evaluations and sweeps in a folder, at any depth."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "config.yaml" in files:
            folders.clear()  # what a run keeps is no run
            yield Path(place)
        elif any((Path(place, name) / "config.yaml").is_file() for name in folders if name.isdigit()):
            yield Path(place)


def index(folder: Path) -> str:
    """Return the page of a folder: its runs and sweeps with the settings in which the runs differ, and its evaluations, the
    newest first."""
    found = [Run(place) for place in run_folders(folder)]
    trained = [run for run in found if run.config and not run.evaluates]
    by_arm = arms(trained)
    arm_of = {run: arm for arm, members in by_arm.items() for run in members} if len(by_arm) > 1 else {}
    runs, evaluations = [], []
    for run in sorted(found, key=lambda run: run.manifest.get("started") or "", reverse=True):
        path = run.folder.relative_to(folder).as_posix()
        line = {
            "name": path if path != "." else run.name,
            "started": minute(run.manifest.get("started")),
        }
        if run.evaluates:
            accuracy = run.saved("metrics.json", json.loads).get("eval/accuracy", {})
            policy = run.config["model"]["path"]
            policy = policy if isinstance(policy, str) else policy["_target_"]  # what makes it
            evaluations.append(line | {"of": policy, "problems": accuracy.get("n"), "accuracy": accuracy.get("value")})
            continue
        line |= {"link": quote(f"/{path}/report.html"), "status": run.status if run.config else "sweep"}
        line |= {"arm": arm_of.get(run, ""), "seed": str(run.seed) if run.config else None}
        line |= {"rollouts": run.manifest.get("rollouts")}
        curve = run.accuracy
        runs.append(line | {"accuracy": curve.iloc[-1] if len(curve) else None})
    about = {"kind": "folder", "name": f"All runs in {folder.resolve()}", "facts": [], "numbers": []}
    data = {**about, "runs": runs, "evaluations": evaluations, "metrics": {}, "live": REFRESH}
    return page({**data, **dictionary(())})


def answer(folder: Path, path: str) -> tuple[int, str]:
    """Return status and page for the path of a request. Only runs and sweeps of the folder have pages."""
    if path == "/":
        return 200, index(folder)
    place = folder / unquote(path).strip("/").removesuffix("report.html")
    if place not in run_folders(folder):
        return 404, "there is no such run"
    try:
        return 200, document(place, place / "report.html", live=REFRESH)
    except UserError as error:  # nothing was written yet
        return 404, str(error)


def serve(folder: str | Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a folder on this machine's loopback. port: 0 takes a free one. Raises UserError if it is taken."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{folder} is no folder: name one with runs, such as outputs")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            # a name of another site may lead here
            is_ours = host in ("127.0.0.1", "localhost")
            status, text = answer(root, urlsplit(self.path).path) if is_ours else (403, "ask for 127.0.0.1")
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; choose another with --port") from None
