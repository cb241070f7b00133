"""Daemons by fork from one process that has everything imported: a start costs a few hundredths of a second of CPU.

Run as a script it is that process: it reads a JSON line per wish (``{"argv", "env", "output", "errors"}`` or
``{"wait": pid}``) and answers with one. The child becomes what ``argv`` says, and ends as an interpreter does.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


class Born:
    """A forked daemon, as far as tests use a `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"wait": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["forked"], timeout or 0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks; one for all, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: Path, errors: Path) -> Born:
        """A new daemon."""
        wish = {"argv": list(argv), "env": dict(env), "output": str(output), "errors": str(errors)}
        return Born(self, self.ask(wish)["pid"])

    def ask(self, wish: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
        """One wish, one answer."""
        with self._lock:
            if self._process is None:
                # Without a session of its own Ctrl-C reaches the daemons too, as it does in a terminal.
                command = [sys.executable, str(HERE)]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                atexit.register(self.close)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(wish).encode() + b"\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

    def close(self) -> None:
        """End it; the daemons live on."""
        with self._lock:
            if self._process is not None:
                self._process.communicate()
                self._process = None


def _serve() -> list[str]:
    """Answer wishes; returns in a child, with its command line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.set_inheritable(answers.fileno(), False)
    for line in iter(sys.stdin.buffer.readline, b""):
        wish = json.loads(line)
        if "wait" in wish:
            pid, status = os.waitpid(wish["wait"], os.WNOHANG)
            ended = os.waitstatus_to_exitcode(status) if pid else None
            answers.write(json.dumps({"status": ended}).encode() + b"\n")
            continue
        child = os.fork()
        if child == 0:
            answers.close()
            _become(wish)
            argv: list[str] = wish["argv"]
            return argv
        answers.write(json.dumps({"pid": child}).encode() + b"\n")
    sys.exit(0)


def _become(wish: Mapping[str, Any]) -> None:
    for path, target in ((os.devnull, 0), (wish["output"], 1), (wish["errors"], 2)):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(wish["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(wish["argv"])
    sys.orig_argv = [sys.executable, *wish["argv"]]


def _main() -> None:
    sys.path[0:1] = [str(HERE.parents[1]), str(HERE.parents[2])]
    import supervisord_vllm.cli.main
    import supervisord_vllm.cli.run
    import supervisord_vllm.foreground
    from crash import points

    argv = _serve()
    if argv[0] == points.__file__:
        points.main()
    else:
        supervisord_vllm.cli.main.main()


if __name__ == "__main__":
    _main()
