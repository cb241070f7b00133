"""The real daemon as a child process on the stand-in engine, as tests drive it: policy file, status, signals."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from supervisord_vllm.places import instance

MODEL = "Qwen/Qwen2.5-7B-Instruct"
PATIENCE_S = 90.0
T = TypeVar("T")

POLICY = """\
schema = 1
name = "t"
state-dir = "{folder}/state"
runtime-dir = "{folder}/run"
{top}
[engine]
command = ["{python}", "-m", "supervisord_vllm.simulation", "serve"]
model = "{model}"
port = {port}
args = {args}
[engine.env]
SIMULATED_CARD = "{folder}/card.json"
SIMULATED_CARD_TOML = "{folder}/card.toml"
SIMULATED_FAULTS = "{faults}"
[levers]
gpu-memory-utilization = 0.90
max-model-len = 8192
max-num-seqs = 16
{levers}
{ladder}
[memory]
source = "card:{folder}/card.json"
[gate]
window = "100ms"
patience = "300ms"
deadline = "{deadline}"
[proof]
concurrency = {burst}
soak = "300ms"
[restart]
backoff = {{ first = "100ms", max = "1s" }}
[poll]
health = "100ms"
metrics = "200ms"
[http]
listen = "127.0.0.1:{http}"
[log]
format = "json"
"""

LADDER = """\
[[ladder]]
lever = "gpu-memory-utilization"
step = 0.05
min = 0.60
max = 0.95
[[ladder]]
lever = "max-num-seqs"
factor = 0.5
min = 4
[[ladder]]
lever = "max-model-len"
min = 1024
[[ladder]]
lever = "enforce-eager"
"""

DEFAULTS: dict[str, object] = {
    "python": sys.executable,
    "model": MODEL,
    "faults": "",
    "levers": "",
    "ladder": LADDER,
    "top": "",
    "args": "[]",
    "deadline": "60s",
    "burst": 0,  # requests are counted by the faults of many tests
}
"""What fills `POLICY`, but for the folder and the ports."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def until(condition: Callable[[], T | None], otherwise: Callable[[], object], seconds: float = PATIENCE_S) -> T:
    """The first true value of the condition; a failure says what was there instead."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {otherwise()}"
        time.sleep(0.05)
    return value


def free_ports() -> tuple[int, int]:
    """Two of them, not the same one twice."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


class DaemonProcess:
    """One instance in a folder of its own."""

    def __init__(self, folder: Path, **values: object) -> None:
        self.folder = folder
        self.port, self.http = free_ports()
        self.process: subprocess.Popen[str] | None = None
        self.errors = folder / "stderr"
        self.output = folder / "stdout"
        # A card of its own: starts on one card are serialised by a lock, over all tests of this machine.
        card = f'schema = 1\nbase = "h200"\n[card]\nuuid = "GPU-{folder.name}"\n[timing]\nspeed = 400\n'
        (folder / "card.toml").write_text(card)
        self.policy = folder / "policy.toml"
        self.write(**values)

    def write(self, **values: object) -> None:
        """Write the policy file."""
        place = {"folder": self.folder, "port": self.port, "http": self.http}
        self.policy.write_text(POLICY.format(**{**DEFAULTS, **place, **values}))

    def start(self, *words: str) -> None:
        """Start the daemon."""
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", "run", "--config", str(self.policy), *words]
        with self.errors.open("a") as errors, self.output.open("a") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, text=True)

    def wait(self) -> int:
        """The daemon's exit status."""
        assert self.process is not None
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end: {self.told()}") from None

    def told(self) -> str:
        """What it said, for a failing test."""
        return self.errors.read_text()[-4000:]

    def term(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def verb(self, *words: str, status: int | None = 0) -> str:
        """A client verb; its standard output."""
        command = [sys.executable, "-m", "supervisord_vllm.cli.main", *words, "--config", str(self.policy)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert status is None or ran.returncode == status, ran.stderr + ran.stdout
        return ran.stdout + ran.stderr

    def http_get(self, path: str) -> tuple[int, str]:
        """Status and body of our own HTTP; 0 where nobody answers."""
        return get(f"http://127.0.0.1:{self.http}{path}")

    def status(self) -> dict[str, Any]:
        """``/api/v1/status``, or an empty document where nobody answers."""
        code, body = self.http_get("/api/v1/status")
        return json.loads(body) if code == 200 else {}

    def history(self) -> dict[str, Any]:
        """``history --json``; read from the store where no daemon runs."""
        document: dict[str, Any] = json.loads(self.verb("history", "--json"))
        return document

    def reaches(self, state: str, launch: int | None = None) -> dict[str, Any]:
        """Wait until it is in a state (with this launch)."""

        def there() -> dict[str, Any] | None:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.told()}")
            found = self.status()
            number = (found.get("launch") or {}).get("number")
            return found if found.get("state") == state and launch in (None, number) else None

        return until(there, lambda: f"{state} (launch {launch}): {self.status()} {self.told()}")

    def complete(self, **more: object) -> tuple[int, str]:
        """One completion by the engine."""
        body = {"model": MODEL, "prompt": "a", "max_tokens": 4, **more}
        return get(f"http://127.0.0.1:{self.port}/v1/completions", body)

    def marked(self) -> list[int]:
        """Processes that carry this instance's marker."""
        needle = f"SUPERVISE_LAUNCH={instance(self.folder / 'state')}.".encode()
        found = []
        for pid in filter(str.isdigit, (entry.name for entry in Path("/proc").iterdir())):
            try:
                if needle in Path(f"/proc/{pid}/environ").read_bytes() and _alive(int(pid)):
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def close(self) -> None:
        """End the daemon and assert that nothing of this instance is left."""
        if self.process is not None and self.process.poll() is None:
            self.term()
        left = self.marked()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == [], f"left behind: {left}: {self.told()}"


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def get(url: str, body: object = None) -> tuple[int, str]:
    """An HTTP request to loopback: status and body, status 0 where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):  # refused, reset, or broken off in the middle of a stream
        return 0, ""


@contextmanager
def daemon(**values: object) -> Iterator[DaemonProcess]:
    """A daemon (not started yet) in a short-named folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    instance_of = DaemonProcess(folder, **values)
    try:
        yield instance_of
    finally:
        instance_of.close()
        shutil.rmtree(folder)
