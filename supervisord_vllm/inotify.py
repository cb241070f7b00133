"""Being told by the kernel that a file or folder changed (inotify), where it can; standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

MODIFIED: Final = 0x2
MOVED_HERE: Final = 0x80
CREATED: Final = 0x100


class Watch:
    """Changes of some paths, announced by its descriptor turning readable. ``fileno()`` is -1 where the kernel gives no
    watch (its limit is reached): then nothing is ever announced, and the caller must look now and then anyway.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, path: Path, events: int) -> bool:
        """Watch one more path; whether that was granted."""
        return self._descriptor >= 0 and self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events) >= 0

    def fileno(self) -> int:
        """What to wait for."""
        return self._descriptor

    def clear(self) -> None:
        """Take what was announced so far."""
        with contextlib.suppress(BlockingIOError):
            while self._descriptor >= 0 and os.read(self._descriptor, 1 << 14):
                pass

    def close(self) -> None:
        """Be told no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
