r"""Reading the engine's output as it is written, without ever being in its way.

Contract: the file is only read, never locked or changed. Whole lines come in batches, in order, without their ``\n``;
a ``\r`` inside stays. A line is at most 64 KiB: of a longer one the beginning comes, the rest is dropped and counted.
With each line comes the position behind it, the same whenever and from wherever the file is read. A hole that was
punched into it (`supervisord_vllm.holes`) is no text: the line before it ends there, the fragment behind it is left
out.
Once ``stopped`` is set (the exit was seen) everything that the file holds then is still delivered, a torn last line
included, and the iteration ends. Reads happen in a thread, 256 KiB at a time, and the loop gets its turn between
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from supervisord_vllm.holes import data_from
from supervisord_vllm.inotify import MODIFIED, Watch

LINE_LIMIT = 64 << 10
"""Bytes of a line that are kept."""
READ_SIZE = 256 << 10
FALLBACK_S = 1.0
"""Seconds after which the file is looked at although nothing was announced (a network file system, say)."""
SETTLE_S = 0.02
"""Seconds between a short read and the next: a program that writes line by line costs at most 50 reads a second."""


class Lines(list[bytes]):
    """Some lines, and in ``ends`` the position in the file behind each: whoever has seen the line has seen all before
    that position. Behind a line that was too long it is the place where it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def add(self, line: bytes, end: int) -> None:
        """One more."""
        self.append(line)
        self.ends.append(end)


class _Cutter:
    """Bytes in, whole lines out, in time linear in the bytes. ``position`` is the place of the first byte;
    ``within_line`` says that it lies within a line, whose rest is left out."""

    def __init__(self, position: int = 0, *, within_line: bool = False) -> None:
        self._rest = bytearray()
        self._position = position
        self._dropping = within_line
        self.dropped = 0
        self.cut_lines = 0

    def feed(self, data: bytes) -> Lines:
        """The lines that are complete now. A line that reaches the limit is delivered then, not when it ends."""
        lines = Lines()
        *ended, last = data.split(b"\n")
        for piece in ended:
            self._add(piece, lines)
            self._position += 1
            if self._dropping:
                self._dropping = False
            else:
                lines.add(bytes(self._rest), self._position)
                self._rest.clear()
        self._add(last, lines)
        return lines

    def skip(self, size: int) -> Lines:
        """So many bytes are a hole: what there is of the line before it, as `finish`."""
        lines = self.finish()
        self._position += size
        self._dropping = True
        return lines

    def finish(self) -> Lines:
        """The torn last line, if there is one."""
        lines = Lines()
        if self._rest:
            lines.add(bytes(self._rest), self._position)
        self._rest.clear()
        return lines

    @property
    def held(self) -> int:
        """Bytes of the line that has not ended yet."""
        return len(self._rest)

    def _add(self, piece: bytes, lines: Lines) -> None:
        begin = self._position
        self._position += len(piece)
        if self._dropping:
            self.dropped += len(piece)
            return
        room = LINE_LIMIT - len(self._rest)
        self._rest += piece[:room]
        if len(piece) > room:
            self.dropped += len(piece) - room
            self.cut_lines += 1
            self._dropping = True
            lines.add(bytes(self._rest), begin + room)
            self._rest.clear()


class Tail:
    """One file, read from ``offset`` (bytes) until ``stopped`` is set and its end is reached. Iterate it once::

        async for lines in Tail(path, stopped=stopped):
            ...

    An offset within a line leaves out the rest of that line: those of `Lines.ends` continue where that line was seen.
    What lies between the two positions of ``omit`` is passed over like a hole.

    Raises (when iterated):
        OSError: the file can't be opened or read.
    """

    def __init__(self, path: Path, *, offset: int = 0, stopped: asyncio.Event, omit: tuple[int, int] = (0, 0)) -> None:
        self._path = path
        self._omit = omit
        self._stopped = stopped
        self._cutter = _Cutter(offset)
        self.read_bytes = offset
        """Position up to which the file was read: it grows with every byte that the engine writes, lines or not."""
        self.punched_bytes = 0
        """Bytes of holes that were met, and of what was omitted."""

    @property
    def offset(self) -> int:
        """Position after the last line that was delivered: where a later `Tail` goes on."""
        return self.read_bytes - self._cutter.held

    @property
    def dropped_bytes(self) -> int:
        """Bytes of long lines, and of fragments behind a hole, that were not delivered."""
        return self._cutter.dropped

    @property
    def cut_lines(self) -> int:
        """Lines of which only the beginning was delivered."""
        return self._cutter.cut_lines

    async def __aiter__(self) -> AsyncIterator[Lines]:
        file, within_line = await asyncio.to_thread(_open, self._path, self.read_bytes)
        self._cutter = _Cutter(self.read_bytes, within_line=within_line)
        reading: asyncio.Future[tuple[int, bytes]] | None = None
        loop = asyncio.get_running_loop()
        try:
            with _Announced(self._path) as announced:
                end: int | None = None  # the size of the file once the engine has ended
                while end is None or self.read_bytes < end:
                    # Asked before reading: whatever happens from here on starts another round.
                    if end is None and self._stopped.is_set():
                        end = os.fstat(file).st_size
                    announced.clear()
                    reading = loop.run_in_executor(None, _read, file, self.read_bytes, self._omit)
                    hole, data = await asyncio.shield(reading)
                    if hole:
                        self.read_bytes += hole
                        self.punched_bytes += hole
                        if lines := self._cutter.skip(hole):
                            yield lines
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


def _open(path: Path, position: int) -> tuple[int, bool]:
    """The file, and whether the position lies within a line."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return file, position > 0 and os.pread(file, 1, position - 1) not in (b"", b"\n")
    except OSError:
        os.close(file)
        raise


def _read(file: int, position: int, omit: tuple[int, int]) -> tuple[int, bytes]:
    """The size of the hole at a position, mostly none, and the data behind it."""
    first, last = omit
    start = last if first <= position < last else position
    stretch = data_from(file, start)
    if stretch is None:
        return start - position, b""
    begin, end = stretch
    if begin < first:
        end = min(end, first)
    return begin - position, os.pread(file, min(READ_SIZE, end - begin), begin)


class _Announced:
    """An event that is set when the file was written to; where the kernel gives no watch it is never set."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._event = asyncio.Event()
        self._watch = Watch()

    def __enter__(self) -> asyncio.Event:
        if self._watch.add(self._path, MODIFIED):
            asyncio.get_running_loop().add_reader(self._watch.fileno(), self._readable)
        return self._event

    def _readable(self) -> None:
        self._watch.clear()
        self._event.set()

    def __exit__(self, *_: object) -> None:
        if self._watch.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()


def tail(path: Path, *, offset: int = 0, stopped: asyncio.Event, omit: tuple[int, int] = (0, 0)) -> Tail:
    """The batches of lines of a file, see `Tail`."""
    return Tail(path, offset=offset, stopped=stopped, omit=omit)
