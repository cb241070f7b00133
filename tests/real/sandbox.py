"""A sandbox: folders, ports and an environment for one daemon, seen from outside as an operator sees it.

The daemon is the real command as a child process, its state is read over HTTP and by the command line. At the end
nothing may be left: no process that carries our marker, no file in TMPDIR, no shared memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from real.waiting import until

PROGRAM = Path(sys.executable).with_name("vllm-supervise")
SHARED_MEMORY = Path("/dev/shm")
_OWN_SHARED_MEMORY = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
LONGEST_TMPDIR = 40
START = 150.0
"""Seconds within which one launch of the real engine must serve or fail; 12 to 35 on an idle machine."""
END = 40.0
"""Seconds within which a daemon that was told to stop must be gone: INT 5 s, TERM 5 s, KILL, and a slow machine."""

# What vLLM itself leaves in TMPDIR, even after a clean stop: its process group's rendezvous files and dead zmq sockets.
VLLM_LITTER = re.compile(r"vllm_dist_.*|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|torchinductor_.*")

Json = dict[str, Any]


@dataclass(frozen=True)
class Live:
    """A process that carries our marker."""

    pid: int
    comm: str
    environ: Mapping[str, str]


def environ(pid: int) -> dict[str, str]:
    """A process's environment as it was started with; empty where it is gone or not ours to read."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(part).partition("=") for part in content.split(b"\0"))
    return {name: value for name, separator, value in pairs if separator}


class Stream:
    """A completion that streams; the caller decides when to read on."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START)
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        assert self._response.readline().startswith(b"data: "), "the first token"

    def event(self) -> bytes:
        """The next line of the stream."""
        return self._response.readline()

    def rest(self) -> bytes:
        """All that still comes, up to the end or the break of the connection."""
        received = b""
        with contextlib.suppress(OSError, http.client.HTTPException):
            while chunk := self._response.read1(65536):
                received += chunk
        return received

    def close(self) -> None:
        """Hang up."""
        self._response.close()
        self._connection.close()


class Engine:
    """The engine's own API, as its users call it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def _post(self, path: str, body: Json) -> Json:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START) as answer:
            content: Json = json.load(answer)
            return content

    def chat(self, max_tokens: int = 4) -> Json:
        """One chat completion; an HTTP error raises."""
        messages = [{"role": "user", "content": "hello world"}]
        return self._post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": max_tokens})

    def complete(self, max_tokens: int = 4) -> Json:
        """One completion of exactly this many tokens; an HTTP error raises."""
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": max_tokens, "ignore_eos": True}
        return self._post("/v1/completions", body)

    @contextmanager
    def stream(self, max_tokens: int) -> Iterator[Stream]:
        """A streaming completion that has sent its first token."""
        stream = Stream(self.port, max_tokens)
        try:
            yield stream
        finally:
            stream.close()


def held_port() -> socket.socket:
    """A free port of the loopback, held until the socket is closed."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    return holder


@dataclass
class Sandbox:
    """Folders, ports and, once started, one daemon."""

    root: Path
    engine_port: socket.socket = field(default_factory=held_port)
    http_port: socket.socket = field(default_factory=held_port)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        for folder in (self.tmp, self.state_dir, self.runtime_dir, self.shared_memory):
            folder.mkdir()
        self.ports = (self.engine_port.getsockname()[1], self.http_port.getsockname()[1])
        self.engine = Engine(self.ports[0])

    tmp = property(lambda self: self.root / "t")
    state_dir = property(lambda self: self.root / "s")
    runtime_dir = property(lambda self: self.root / "r")
    policy = property(lambda self: self.root / "policy.toml")
    shared_memory = property(lambda self: SHARED_MEMORY / self.root.name)

    @property
    def instance(self) -> str:
        """What the daemon calls itself in the marker."""
        return hashlib.sha256(os.fsencode(os.path.realpath(self.state_dir))).hexdigest()[:16]

    @property
    def environment(self) -> dict[str, str]:
        """The daemon's: ours, but for TMPDIR and anything that would tell it of another instance."""
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith(("SUPERVISE_", "NOTIFY_", "VLLM"))
        }
        return {**ours, "TMPDIR": str(self.tmp)}

    # The daemon

    def start(self, policy: str, wrap: Callable[..., Sequence[str]] = lambda *argv: argv) -> None:
        """Start the daemon with this policy; ``wrap`` turns its command line into one that runs it in a cage."""
        self.policy.write_text(policy, encoding="utf-8")
        argv = self.with_own_shared_memory(*wrap(str(PROGRAM), "--config", str(self.policy)))
        self.engine_port.close()
        self.http_port.close()
        with (self.root / "out").open("ab") as out, (self.root / "err").open("ab") as err:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.environment, cwd=self.root
            )

    def with_own_shared_memory(self, *argv: str) -> Sequence[str]:
        """A command line that sees a folder of its own as /dev/shm, since names there do not tell whose they are.

        That needs root; elsewhere the command sees the machine's, and nothing is asserted about it.
        """
        if os.geteuid() != 0:
            return argv
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _OWN_SHARED_MEMORY, "sandbox"]
        return [*enter, str(self.shared_memory), *argv]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon."""
        assert self.process is not None
        self.process.send_signal(number)

    def exit_code(self, seconds: float = END) -> int:
        """The daemon's exit code, once it has ended by itself."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end within {seconds:g} s\n{self.report()}") from None

    def status(self) -> Json | None:
        """What /api/v1/status says now; ``None`` before it answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}/api/v1/status", timeout=10) as answer:
                content: Json = json.load(answer)
                return content
        except (urllib.error.URLError, OSError):
            return None

    def wait(self, condition: Callable[[Json], object], seconds: float, what: str) -> Json:
        """The first status that meets the condition; a daemon that ends meanwhile fails the test at once."""

        def look() -> Json | None:
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"the daemon ended with {code} while we waited for {what}"
            status = self.status()
            return status if status is not None and condition(status) else None

        found = until(look, seconds, lambda: f"{what}; last status: {json.dumps(self.status())}")
        assert found is not None
        return found

    def wait_serving(self, launch: int, seconds: float = START) -> Json:
        """The status once this launch is proven; a later launch fails the test at once."""

        def serving(status: Json) -> bool:
            number = (status["launch"] or {}).get("number", 0)
            assert number <= launch, f"launch {number} was not expected: {json.dumps(status['decision'])}"
            return bool(number == launch and status["state"] == "serving" and status["proven"])

        return self.wait(serving, seconds, f"launch {launch} to serve")

    def cli(self, *argv: str, code: int = 0) -> str:
        """What a client verb prints."""
        command = [str(PROGRAM), *argv, "--config", str(self.policy)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=False)
        assert done.returncode == code, f"{argv} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def history(self) -> Json:
        """``history --json``."""
        content: Json = json.loads(self.cli("history", "--json"))
        return content

    def exit_fact(self, launch: int) -> Json:
        """The recorded exit of one launch's main process."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state_dir}/history.sqlite3?mode=ro", uri=True)) as store:
            query = "SELECT json FROM facts WHERE lower(type) = 'exited' AND launch = ?"
            (row,) = store.execute(query, (launch,)).fetchall()
        content: Json = json.loads(row[0])
        return content

    def log(self, launch: int) -> str:
        """The engine's output in one launch; empty before it exists."""
        path = self.state_dir / "launches" / f"{launch:06}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # What is left

    def live(self) -> list[Live]:
        """Processes that carry our instance's marker."""
        found: list[Live] = []
        for folder in Path("/proc").glob("[0-9]*"):
            variables = environ(int(folder.name))
            if variables.get("SUPERVISE_LAUNCH", "").startswith(f"{self.instance}."):
                with contextlib.suppress(OSError):
                    found.append(Live(int(folder.name), (folder / "comm").read_text().strip(), variables))
        return found

    def left(self) -> list[str]:
        """All that a daemon and its engine should not have left."""
        processes = [f"process {process.pid} ({process.comm})" for process in self.live()]
        files = [f"{path}" for path in self.tmp.iterdir() if not VLLM_LITTER.fullmatch(path.name)]
        return processes + files + [f"/dev/shm/{path.name}" for path in self.shared_memory.iterdir()]

    def report(self) -> str:
        """The ends of everything that was printed, for a failed test."""
        paths = [self.root / "err", *sorted(self.state_dir.glob("launches/*.log"))]
        return "\n".join(f"--- {path}\n{tail(path)}" for path in paths if path.exists())

    def close(self) -> None:
        """End the daemon; whatever is left is ended too and fails the test."""
        self.engine_port.close()
        self.http_port.close()
        problems: list[str] = []
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END)
            except subprocess.TimeoutExpired:
                problems.append(f"the daemon had to be killed {END:g} s after SIGTERM")
                self.process.kill()
                self.process.wait()
        problems += self.left()
        for process in self.live():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        until(lambda: not self.live(), END, lambda: f"cannot be killed: {self.live()}")
        shutil.rmtree(self.root)
        shutil.rmtree(self.shared_memory)
        assert not problems, f"left behind: {problems}"


def tail(path: Path, size: int = 4000) -> str:
    """The end of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode("utf-8", "replace")


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A sandbox that is closed and removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="vs-", dir="/tmp"))
    made = Sandbox(root)
    assert len(str(made.tmp)) <= LONGEST_TMPDIR, "vLLM's sockets in TMPDIR would have names that are too long"
    try:
        yield made
    finally:
        made.close()
