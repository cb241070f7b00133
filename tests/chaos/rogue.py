"""A rogue engine: answers as vLLM does, and misbehaves as its plan says. Standard library only, quick to start.

``ROGUE_FOLDER`` is where it counts its starts and writes who it made; ``ROGUE_PLAN`` is a JSON list with one fault per
launch (beyond its end: none). A main process that finds another one's lock taken writes ``two-at-once`` and goes on.
"""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["ROGUE_FOLDER"])
PORT = int(sys.argv[sys.argv.index("--port") + 1])
MODEL = sys.argv[2]
PHASES = ("importing", "weights", "profiling", "capturing")
LINES = {
    "importing": "(APIServer pid=1) INFO 12-01 10:00:00 [api_server.py:1] vLLM API server version 0.26.0",
    "weights": "(EngineCore pid=2) INFO 12-01 10:00:01 [gpu_model_runner.py:1] Starting to load model m...",
    "profiling": "(EngineCore pid=2) INFO 12-01 10:00:02 [gpu_worker.py:1] Available KV cache memory: 10.00 GiB",
    "capturing": "(EngineCore pid=2) INFO 12-01 10:00:03 [kv_cache_utils.py:1] GPU KV cache size: 100,000 tokens",
}
HOLDER = "import sys, time\nblock = bytearray(b'x' * (16 << 20))\nwhile True: time.sleep(60)"


def count() -> int:
    """Which launch this is, from 0."""
    with (FOLDER / "starts").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = file.seek(0, os.SEEK_END)
        file.write(b".")
    with (FOLDER / "logs").open("a") as file:
        file.write(f"{Path('/proc/self/fd/1').readlink()}\n")
    return number


def note(pid: int) -> None:
    with (FOLDER / "made").open("a") as file:
        file.write(f"{pid}\n")


def escape(environment: dict[str, str]) -> None:
    """A memory holder, forked twice, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-S", "-c", HOLDER], environment)  # noqa: S606 - no shell
        note(pid)
        os._exit(0)
    os.wait()


def multiply() -> None:
    """Processes that fork and go, all the time."""
    for _ in range(2):
        if os.fork() == 0:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                time.sleep(0.002)
                if os.fork():
                    os._exit(0)
            os._exit(0)


def spam() -> None:
    """About 10^5 lines a second, for half a second."""
    lines = b"".join(b"(EngineCore pid=2) INFO 12-01 10:00:00 [core.py:%d] it happened\n" % n for n in range(1000))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        os.write(1, lines)
        time.sleep(0.01)


class Handler(http.server.BaseHTTPRequestHandler):
    """Health, metrics, models, completions."""

    def reply(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(b"")
        elif self.path == "/metrics":
            self.reply(b"vllm:num_requests_running 0\nvllm:generation_tokens_total 5\n")
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": MODEL}]}).encode())
        else:
            self.reply(b"{}", 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply(json.dumps({"choices": [{"text": "a"}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def half_open() -> None:
    """Accepts, and never says a word."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=16)
    kept = []
    while True:
        kept.append(listener.accept())


def misbehave(fault: str) -> None:
    """What happens a moment after it serves."""
    time.sleep(0.5)
    if fault == "exit-zero":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "spam":
        spam()
        os._exit(1)
    if fault == "fatal-line":
        print("(EngineCore pid=2) ERROR 12-01 10:00:09 [core.py:1] EngineCore encountered a fatal error.", flush=True)
        time.sleep(1)
        os._exit(0)
    if fault == "fork-and-die":
        multiply()
        os._exit(0)


def say_fatal(*_: object) -> None:
    """SIGUSR1: the core says that it dies, and lives on."""
    os.write(1, b"(EngineCore pid=2) ERROR 12-01 10:00:09 [core.py:1] EngineCore encountered a fatal error.\n")


def main() -> None:
    signal.signal(signal.SIGUSR1, say_fatal)
    number = count()
    plan = json.loads(os.environ["ROGUE_PLAN"])
    fault = plan[number] if number < len(plan) else ""
    lock = (FOLDER / "main").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (FOLDER / "two-at-once").write_text(f"launch {number}")
    if fault == "ignore-signals":
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if fault == "escape":
        escape(dict(os.environ))
    if fault == "escape-bare":
        escape({})
    if fault == "multiply":
        multiply()
    for phase in PHASES:
        print(LINES[phase], flush=True)
        if fault == f"die-{phase}":
            print(f"(EngineCore pid=2) ERROR 12-01 10:00:04 [core.py:1] RuntimeError: rogue while {phase}", flush=True)
            os._exit(1)
        if fault == f"wedge-{phase}":
            time.sleep(600)
    if fault == "half-open":
        half_open()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    server.daemon_threads = True
    print("(APIServer pid=1) INFO:     Application startup complete.", flush=True)
    threading.Thread(target=misbehave, args=(fault,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
