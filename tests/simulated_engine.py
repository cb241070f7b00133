"""Running the stand-in engine in tests: a card of its own in a temporary folder, its output, its end by pid."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from supervisord_vllm.simulation.memory import read_memory
from supervisord_vllm.simulation.shared_card import SharedCard, start_ticks

CAPTURES = Path(__file__).parent / "data" / "captures" / "h200-vllm-0.26.0"
MODEL = "Qwen/Qwen2.5-7B-Instruct"
LARGE = "Qwen/Qwen2.5-72B-Instruct"
DEADLINE = 60.0
"""Seconds that a condition may take on a busy machine; it is awaited, not slept."""

FAST = """schema = 1
base = "h200"
[timing]
speed = 5000
token = "1ms"
prefill = "1ms"
"""


def await_condition(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Wait until the condition holds; fail with its name."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Engine:
    """One launch of the stand-in."""

    def __init__(self, state: Path, *flags: str, model: str = MODEL, faults: str = "", port: int | None = None) -> None:
        self.state = state
        self.port = free_port() if port is None else port
        self.log = state.parent / f"engine-{self.port}-{time.monotonic_ns()}.log"
        environment = {**os.environ, "SIMULATED_CARD": str(state), "SIMULATED_FAULTS": faults, "NO_COLOR": "1"}
        command = [
            sys.executable,
            "-m",
            "supervisord_vllm.simulation",
            "serve",
            model,
            "--port",
            str(self.port),
            *flags,
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def text(self) -> str:
        """All output so far."""
        return self.log.read_text(encoding="utf-8")

    def await_text(self, text: str) -> None:
        """Wait for a line of output."""
        await_condition(lambda: text in self.text() or self.process.poll() is not None, text)
        assert text in self.text(), self.text()[-3000:]

    def ready(self) -> Engine:
        """Wait until /health says 200."""
        await_condition(lambda: self.health() == 200 or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.text()[-3000:]
        return self

    def exit_code(self) -> int:
        """Wait for the end of the main process."""
        return self.process.wait(DEADLINE)

    def health(self) -> int | None:
        """HTTP status of /health, ``None`` without an answer."""
        return self.request("/health")[0]

    def request(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int | None, str]:
        """One request; status and body, ``(None, "")`` without an answer."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, http.client.HTTPException):
            return None, ""

    def complete(self, **body: object) -> tuple[int | None, str]:
        """A completion request."""
        return self.request("/v1/completions", {"prompt": "hello", "max_tokens": 4, **body})

    def core(self) -> int:
        """Pid of the EngineCore, as the card knows it."""
        found = [holder.pid for holder in read_memory(self.state).holders if holder.command == "VLLM::EngineCore"]
        assert found
        return found[0]

    def stop(self) -> None:
        """End whatever is left of this launch: only pids of its own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE)


@contextlib.contextmanager
def card_in(folder: Path, extra: str = "") -> Iterator[Path]:
    """A fresh fast card; on leaving, everything that ran on it ends because the card is taken away."""
    state = folder / "card.json"
    SharedCard(state).insert(FAST + extra)
    try:
        yield state
    finally:
        holders = read_memory(state).holders
        state.unlink()
        for holder in holders:
            await_condition(functools.partial(_gone, holder.pid), f"end of pid {holder.pid}")


def _gone(pid: int) -> bool:
    return start_ticks(pid) is None


@contextlib.contextmanager
def neighbour(state: Path, size: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A neighbour that is waited for unless it waits for something itself."""
    command = [sys.executable, "-m", "supervisord_vllm.simulation.neighbour", "--card", str(state), "--bytes", size]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            if not options:
                await_condition(lambda: process.pid in {h.pid for h in read_memory(state).holders}, "neighbour")
            yield process
        finally:
            process.kill()


def frames_of(text: str, role: str = "EngineCore") -> list[str]:
    """Function names of a role's first traceback."""
    found: list[str] = []
    for line in text.splitlines():
        if not line.startswith(f"({role} "):
            continue
        match = re.search(r'  File "[^"]*", line \d+, in (.*)$', line)
        if match:
            found.append(match[1])
        elif found:
            break
    return found


def shape(text: str) -> list[str]:
    """Lines without what differs between two runs: pids, times, numbers, paths, configuration values."""
    result = []
    for line in re.split(r"[\r\n]+", text):
        plain = re.sub(r"\(\w+ pid=\d+\) ?$", "", line)
        if not plain.strip() or "ulimit" in plain or re.search(r'"(GET|POST) /', plain) or "it/s]" in plain:
            continue
        plain = re.sub(r"pid=\d+", "pid", plain)
        plain = re.sub(r"(INFO|WARNING|ERROR) \S+ \S+", r"\1", plain)
        plain = re.sub(
            r"(with config:|non-default args:|scheduled_new_reqs=|from path |saved AOT .* to ).*", r"\1", plain
        )
        plain = re.sub(r"(Using cache directory: ).*( for )", r"\1\2", plain)
        plain = re.sub(r"distributed_init_method=\S+", "", plain)
        plain = re.sub(r'File "(?:<site>|<python>|/opt/vllm/\S*site-packages|/usr/lib/python3.12)/', 'File "', plain)
        plain = re.sub(r"http://\S+:\d+", "http", plain)
        plain = re.sub(r"(<models>/\d+b|Qwen/\S+-Instruct)", "MODEL", plain)
        result.append(re.sub(r"-?\d[\d,.]*", "N", plain).rstrip())
    return result
