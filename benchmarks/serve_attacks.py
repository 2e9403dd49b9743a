"""Attack grpo.serve, and measure how long one honest request waits meanwhile: it samples 8 tokens, and alone takes milliseconds.

    python benchmarks/serve_attacks.py                  # every attack, each on a server of its own
    python benchmarks/serve_attacks.py prompt gone      # two of them

An attack without an answer within PATIENCE seconds, or an honest request without one, counts as "none". Memory is how much the
server's resident set grew at its peak.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

ROOT = Path.cwd()  # the tree whose server is attacked
MODEL = Path(__file__).parents[1] / "grpo" / "extras" / "demo" / "demo_models" / "wordmath"
PATIENCE = 30
HONEST = {"prompt": {"prompt_token_ids": [1, 7, 9]}, "max_tokens": 8, "temperature": 0}
LONG = {"prompt": {"prompt_token_ids": [1, 7]}, "max_tokens": 4000, "stop_token_ids": [], "top_k": 1}


def ask(port: int, path: str, body: bytes, headers: str = "", wait: float = PATIENCE) -> str:
    """Send a POST and return the status of the answer; "none" without one."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        start = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        head = "" if "Host:" not in headers else start.replace(f"Host: 127.0.0.1:{port}\r\n", "")
        length = "" if "Transfer" in headers else f"Content-Length: {len(body)}\r\n"
        with suppress(ConnectionError):  # a refused body may be cut off
            connection.sendall(f"{head or start}{length}{headers}Connection: close\r\n\r\n".encode() + body)
        words = connection.recv(64).decode(errors="replace").split()
        return words[1] if len(words) > 1 else "closed"
    return "none"


def post(path: str, body: object = None, headers: str = "") -> Callable[[int], str]:
    data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    return lambda port: ask(port, path, data, headers)


def gone(port: int) -> str:
    """Ask for many long samples, and leave."""
    with suppress(TimeoutError):
        ask(port, "/generate", json.dumps(LONG | {"n": 256}).encode(), wait=1)
    return "left"


def full(port: int) -> str:
    """1000 connections, each with a request of 4000 tokens with settings of its own."""
    found: list[str] = []

    def one(i: int) -> None:
        found.append(ask(port, "/generate", json.dumps(LONG | {"max_tokens": 3000 + i}).encode(), wait=20))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{found.count(status)} x {status}" for status in sorted(set(found)))


def slow(port: int) -> str:
    """500 connections that send one byte of a header a second; the answer is the time after which the last one is closed."""
    some = [socket.create_connection(("127.0.0.1", port)) for _ in range(500)]
    began, still = time.monotonic(), len(some)
    while still and time.monotonic() - began < PATIENCE:
        time.sleep(1)
        still = 0
        for connection in some:
            with suppress(OSError):
                connection.send(b"G")
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.recv(1)
                    continue
                still += 1
    return f"{still} stay" if still else f"closed in {time.monotonic() - began:.0f} s"


def elsewhere(port: int) -> str:
    """Load weights from a folder that was not allowed."""
    with TemporaryDirectory() as folder:
        shutil.copytree(MODEL, folder, dirs_exist_ok=True)
        return post("/reload_weights", {"path": folder})(port)


def chunked(size: int, of: int) -> bytes:
    return (f"{of:x}\r\n".encode() + b"x" * of + b"\r\n") * (size // of) + b"0\r\n\r\n"


ATTACKS: dict[str, Callable[[int], str]] = {
    "no attack": lambda port: time.sleep(3) or "",
    "prompt of 120 MB": post("/generate", {"prompt": "one two " * 15_000_000}),
    "prompt of 7 MB": post("/generate", {"prompt": "one two " * 900_000}),
    "body of 500 MB, chunked": lambda port: ask(
        port, "/generate", chunked(500_000_000, 65536), "Transfer-Encoding: chunked\r\n"
    ),
    "body of 2 MB in chunks of a byte": lambda port: ask(
        port, "/generate", chunked(2_000_000, 1), "Transfer-Encoding: chunked\r\n"
    ),
    "n=10000 of 4000 tokens": post("/generate", LONG | {"n": 10_000}),
    "256 samples of 4000 tokens, client gone": gone,
    "150,000 conversations": post(
        "/generate", {"messages": [[{"role": "user", "content": "x"}]] * 150_000, "max_tokens": 4}
    ),
    "1000 long requests at a time": full,
    "500 slow headers": slow,
    "POST /pause from a web page": post("/pause", b"{}", "Origin: http://evil.example\r\n"),
    "POST /pause after DNS rebinding": post("/pause", b"{}", "Host: evil.example\r\n"),
    "weights from another folder": elsewhere,
}


@contextmanager
def server():
    """Start the server of this tree, and yield its port and process."""
    command = [sys.executable, "-m", "grpo.serve", "model=path", f"model.path={MODEL}", "engine=transformers"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "port=0", "device=cpu"], cwd=ROOT, env=environment, **pipes)
    try:
        yield int(process.stdout.readline().rpartition(":")[2]), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def measure(name: str, attack: Callable[[int], str]) -> str:
    """Return a row of the table: the attack, its answer, the honest request's worst time during and after it, memory."""
    with server() as (port, process):
        honest = json.dumps(HONEST).encode()
        for _ in range(3):
            ask(port, "/generate", honest)
        answer: list[str] = []
        before = peak = process.memory_info().rss
        thread = threading.Thread(target=lambda: answer.append(attack(port)), daemon=True)
        thread.start()
        worst, began, status = 0.0, time.monotonic(), "200"
        while status == "200" and (thread.is_alive() or time.monotonic() - began < 3):
            asked = time.monotonic()
            status = ask(port, "/generate", honest)
            worst = max(worst, time.monotonic() - asked)
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.05)
        thread.join(PATIENCE)
        waited = f"{worst:.2f} s" if status == "200" else f"{status} after {worst:.0f} s"
        return f"| {name} | {(answer or ['none'])[0]} | {waited} | {(peak - before) / 1e6:.0f} MB |"


if __name__ == "__main__":
    print("| attack | answer | honest request, worst | memory |\n|---|---|---|---|")
    for name, attack in ATTACKS.items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            print(measure(name, attack), flush=True)
