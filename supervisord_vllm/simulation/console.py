"""Writing lines the way vLLM 0.26 writes them: every line of a process begins with its tag, errors repeat the whole
prefix.

Logging goes to stdout; tracebacks, uvicorn's notices and progress bars go to stderr. A line is one write, so that
lines of two processes on one file do not mix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

SITE = "/opt/vllm/lib/python3.12/site-packages"
PYTHON = "/usr/lib/python3.12"


class Console:
    """The output of one process; ``role`` is ``APIServer`` or ``EngineCore``."""

    def __init__(self, role: str) -> None:
        self.tag = f"({role} pid={os.getpid()}) "

    def info(self, source: str, message: str) -> None:
        """An INFO record of ``source`` (``file.py:line``)."""
        self._record("INFO", source, message)

    def warning(self, source: str, message: str) -> None:
        """A WARNING record."""
        self._record("WARNING", source, message)

    def error(self, source: str, *messages: str) -> None:
        """An ERROR record; every further line carries the same prefix."""
        for message in messages:
            self._record("ERROR", source, message)

    def uvicorn(self, message: str, access: bool = False) -> None:
        """A line of uvicorn, which has a format of its own."""
        _write(1 if access else 2, f"{self.tag}INFO:     {message}\n")

    def bare(self, lines: Iterable[str]) -> None:
        """Lines on stderr with the tag only: a traceback."""
        _write(2, "".join(f"{self.tag}{line}\n" for line in lines))

    def progress(self, label: str, total: int, rate: float) -> None:
        """A finished progress bar as tqdm leaves it in a file: its states parted by carriage returns."""
        states = []
        for done in sorted({0, max(1, total // 3), total}):
            bar = "█" * (10 * done // total) + " " * (10 - 10 * done // total)
            speed = f"[00:00<00:00, {rate:.2f}it/s]" if done else "[00:00<?, ?it/s]"
            states.append(f"\r{label}: {100 * done // total:3d}%|{bar}| {done}/{total} {speed}")
        _write(2, f"{self.tag}{''.join(states)}\n")

    def _record(self, level: str, source: str, message: str) -> None:
        _write(1, f"{self.tag}{level} {time.strftime('%m-%d %H:%M:%S')} [{source}] {message}\n")


def untagged(text: str) -> None:
    """A line that C++ code writes to stderr, without any tag."""
    _write(2, text + "\n")


def _write(stream: int, text: str) -> None:
    data = text.encode()
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        pass  # whoever read the output is gone; a real engine goes on serving, too
