"""The stand-in engine, printing numbered lines for as long as it lives: a reader must miss none and see none twice.

``NUMBERED_FOLDER`` is where it says which log it writes to (``logs``), and where a main process that finds another
one's lock taken writes ``two-at-once``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

FOLDER = Path(os.environ["NUMBERED_FOLDER"])
EVERY_S = 0.01


def alone() -> None:
    """Hold the lock that only one engine of an instance may hold."""
    lock = os.open(FOLDER / "main", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (FOLDER / "two-at-once").write_text(log())


def log() -> str:
    """The name of the launch's log."""
    return Path("/proc/self/fd/1").readlink().name


def count() -> None:
    """A line every hundredth of a second; on a full disk the same one until there is room."""
    name, number = log(), 0
    while True:
        number += 1
        line = f"numbered {name} {number}\n".encode()
        while line:
            with contextlib.suppress(OSError):
                line = line[os.write(1, line) :]
            time.sleep(EVERY_S)


def main() -> int:
    """The stand-in."""
    with (FOLDER / "logs").open("a") as file:
        file.write(f"{log()}\n")
    alone()
    threading.Thread(target=count, daemon=True).start()
    from supervisord_vllm.simulation.__main__ import main as stand_in

    return stand_in(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
