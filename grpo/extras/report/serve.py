"""Shows all runs of a folder in a browser. A page is made when it is asked for, so it is of that moment."""

from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from grpo.extras.report import document
from grpo.extras.report.runs import run_folders
from grpo.system.errors import UserError

REFRESH = 10.0  # seconds after which pages of what goes on load themselves again, at least
NO_PAGE = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="{every:.0f}">'
    "<title>no page yet</title><p>There is no page: {words}</p><p>This one loads itself again.</p>"
)


def answer(folder: Path, path: str) -> tuple[int, str]:
    """Return status and page for the path of a request. Only the folder, and the runs and sweeps in it, have pages."""
    place = folder / unquote(path).strip("/").removesuffix("report.html")
    if path != "/" and place not in run_folders(folder):
        return 404, "there is no such run"
    try:
        return 200, document(place, None if path == "/" else place / "report.html", live=REFRESH)
    except Exception as error:  # nothing was written yet, or a file is just being written
        words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return 503, NO_PAGE.format(every=REFRESH, words=escape(words))


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
            self.send_header("Content-Type", f"text/{'html' if status in (200, 503) else 'plain'}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; choose another with --port") from None
