r"""Reading the engine's output as it is written, without ever being in its way.

Contract: the file is only read, never locked or changed. Whole lines come in batches, in order, without their ``\n``;
a ``\r`` inside stays. A line is at most 64 KiB: of a longer one the beginning comes, the rest is dropped and counted.
Once ``stopped`` is set (the exit was seen) everything that the file holds then is still delivered, a torn last line
included, and the iteration ends. Reads happen in a thread, 256 KiB at a time, and the loop gets its turn between
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator
from pathlib import Path

LINE_LIMIT = 64 << 10
"""Bytes of a line that are kept."""
READ_SIZE = 256 << 10
FALLBACK_S = 1.0
"""Seconds after which the file is looked at although nothing was announced (a network file system, say)."""
SETTLE_S = 0.02
"""Seconds between a short read and the next: a program that writes line by line costs at most 50 reads a second."""
_IN_MODIFY = 0x2


class _Cutter:
    """Bytes in, whole lines out, in time linear in the bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._dropping = False
        self.dropped = 0
        self.cut_lines = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now. A line that reaches the limit is delivered then, not when it ends."""
        lines: list[bytes] = []
        *ended, last = data.split(b"\n")
        for piece in ended:
            self._add(piece, lines)
            if self._dropping:
                self._dropping = False
            else:
                lines.append(bytes(self._rest))
                self._rest.clear()
        self._add(last, lines)
        return lines

    def finish(self) -> list[bytes]:
        """The torn last line, if there is one."""
        lines = [bytes(self._rest)] if self._rest else []
        self._rest.clear()
        return lines

    @property
    def held(self) -> int:
        """Bytes of the line that has not ended yet."""
        return len(self._rest)

    def _add(self, piece: bytes, lines: list[bytes]) -> None:
        if self._dropping:
            self.dropped += len(piece)
            return
        room = LINE_LIMIT - len(self._rest)
        self._rest += piece[:room]
        if len(piece) > room:
            self.dropped += len(piece) - room
            self.cut_lines += 1
            self._dropping = True
            lines.append(bytes(self._rest))
            self._rest.clear()


class Tail:
    """One file, read from ``offset`` (bytes) until ``stopped`` is set and its end is reached. Iterate it once::

        async for lines in Tail(path, stopped=stopped):
            ...

    Raises (when iterated):
        OSError: the file can't be opened or read.
    """

    def __init__(self, path: Path, *, offset: int = 0, stopped: asyncio.Event) -> None:
        self._path = path
        self._stopped = stopped
        self._cutter = _Cutter()
        self.read_bytes = offset
        """Position up to which the file was read: it grows with every byte that the engine writes, lines or not."""

    @property
    def offset(self) -> int:
        """Position after the last line that was delivered: where a later `Tail` goes on."""
        return self.read_bytes - self._cutter.held

    @property
    def dropped_bytes(self) -> int:
        """Bytes of long lines that were not delivered."""
        return self._cutter.dropped

    @property
    def cut_lines(self) -> int:
        """Lines of which only the beginning was delivered."""
        return self._cutter.cut_lines

    async def __aiter__(self) -> AsyncIterator[list[bytes]]:
        file = await asyncio.to_thread(os.open, self._path, os.O_RDONLY | os.O_CLOEXEC)
        reading: asyncio.Future[bytes] | None = None
        loop = asyncio.get_running_loop()
        try:
            with _Announced(self._path) as announced:
                end: int | None = None  # the size of the file once the engine has ended
                while end is None or self.read_bytes < end:
                    # Asked before reading: whatever happens from here on starts another round.
                    if end is None and self._stopped.is_set():
                        end = os.fstat(file).st_size
                    announced.clear()
                    reading = loop.run_in_executor(None, os.pread, file, READ_SIZE, self.read_bytes)
                    data = await asyncio.shield(reading)
                    self.read_bytes += len(data)
                    if lines := self._cutter.feed(data):
                        yield lines
                    if len(data) == READ_SIZE:
                        await asyncio.sleep(0)
                    elif end is not None:
                        if not data:  # it was cut shorter
                            break
                    elif data:
                        await self._stop_within(SETTLE_S)
                    else:
                        await self._woken(announced)
            if lines := self._cutter.finish():
                yield lines
        finally:
            if reading is not None and not reading.done():
                # Cancelled while a disk hangs: the thread still uses the file.
                reading.add_done_callback(lambda _: os.close(file))
            else:
                os.close(file)

    async def _stop_within(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    async def _woken(self, announced: asyncio.Event) -> None:
        """Waits for a write, the stop or the fallback, whichever is first."""
        waits = [asyncio.ensure_future(event.wait()) for event in (announced, self._stopped)]
        try:
            await asyncio.wait(waits, timeout=FALLBACK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class _Announced:
    """An event that inotify sets when the file was written to; where inotify is not to be had it is never set."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._event = asyncio.Event()
        self._descriptor = -1

    def __enter__(self) -> asyncio.Event:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor >= 0:
            libc.inotify_add_watch(self._descriptor, os.fsencode(self._path), _IN_MODIFY)
            asyncio.get_running_loop().add_reader(self._descriptor, self._readable)
        return self._event

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 1 << 14):
                pass
        self._event.set()

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)


def tail(path: Path, *, offset: int = 0, stopped: asyncio.Event) -> Tail:
    """The batches of lines of a file, see `Tail`."""
    return Tail(path, offset=offset, stopped=stopped)
