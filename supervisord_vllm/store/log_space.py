"""The disk space of one launch's log while it is written: bounded, and reserved ahead.

Contract: no position in the log ever changes and no byte is taken that was not read. Of what was read the head (the
start: versions, memory, KV cache) and as much of the end as the bound leaves stay, what is between goes in steps. While
the disk is low all that was read goes but the head, and past logs keep only their heads and ends. Behind the end of the
log some blocks are always reserved, so that the engine can print on a disk that others filled: a vLLM that cannot print
loses lines while it serves and dies while it starts (docs/output.md). What a file system cannot
do is said once a launch, and is all.

Blocking: call `LogSpace.keep` in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from supervisord_vllm.holes import punch, refused, reserve

HEAD_BYTES: Final = 4 << 20
"""What stays of a log's beginning; a start with everything that can be logged prints less. It is at most half of the
reserve: what is read beyond makes room for what comes, also where nothing else does.
"""
END_BYTES: Final = 1 << 20
"""What stays of a past log's end while the disk is low."""
RESERVE_BYTES: Final = 8 << 20
"""What is reserved for a log; of a small disk a thirty-second part."""
LOW_BYTES: Final = 1 << 30
"""Less free than this is low; of a small disk a twentieth part."""
_LEAST: Final = 64 << 10


class Disk(NamedTuple):
    """A file system as it is now, in bytes; ``free`` is what we may still use."""

    free: int
    total: int

    @classmethod
    def of(cls, path: Path) -> Disk:
        """The one that a file or folder lies on. Raises `OSError`."""
        found = os.statvfs(path)
        return cls(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    @property
    def low_mark(self) -> int:
        """Free bytes below which the disk is low."""
        return min(LOW_BYTES, self.total // 20)

    @property
    def reserve(self) -> int:
        """What may be reserved for one log."""
        return max(_LEAST, min(RESERVE_BYTES, self.total // 32) // _LEAST * _LEAST)


class LogSpace:
    """Of the log at ``path``, which may take ``bound`` bytes of disk beside what was not read yet and the reserve.

    ``tell`` gets what an operator should know, once each time that it begins; ``low`` is called when the disk becomes
    low.
    """

    def __init__(self, path: Path, bound: int, tell: Callable[[str], object], low: Callable[[], object]) -> None:
        self._path = path
        self._bound = bound
        self._step = max(bound // 16, _LEAST)
        self._tell = tell
        self._became_low = low
        self._file = -1
        self._punched = 0
        """Where the hole ends, or begins as long as there is none."""
        self._reserved = 0
        self._low = False
        self._full = False
        self._can_punch = True
        self._can_reserve = True

    def due(self, read: int) -> bool:
        """Whether so much was read since that `keep` should come before its time."""
        return self._can_punch and read - self._end - self._punched > self._step

    @property
    def _end(self) -> int:
        """Bytes that stay of what was read last."""
        return self._bound - min(HEAD_BYTES, self._bound // 2)

    def keep(self, read: int) -> None:
        """Give back what the bound or the disk asks for, and reserve anew; ``read`` is the position up to which the log
        was read. A disk that fails changes nothing.
        """
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                # Not before its last thread has ended, however long a disk hangs: the number could be another file's.
                weakref.finalize(self, os.close, self._file)
            disk = Disk.of(self._path.parent)
            self._punched = max(self._punched, min(HEAD_BYTES, self._bound // 2, disk.reserve // 2))
            self._judge(disk)
            self._punch(read if self._low else read - self._end, _LEAST if self._low else self._step)
            self._reserve(disk)

    def _judge(self, disk: Disk) -> None:
        mark = disk.low_mark
        if not self._low and disk.free < mark:
            self._low = True
            self._tell(
                f"the disk of {self._path.parent} has {disk.free >> 20} MiB left: launch logs lose what was read but "
                "for their beginnings; free some space"
            )
            self._became_low()
        elif self._low and disk.free > mark + mark // 4:
            self._low = False
            self._tell(f"the disk of {self._path.parent} has room again, {disk.free >> 20} MiB")

    def _punch(self, end: int, step: int) -> None:
        if not self._can_punch or end - self._punched < step:
            return
        try:
            self._punched = max(self._punched, punch(self._file, self._punched, end)[1])
        except OSError as error:
            if not refused(error):
                raise
            self._can_punch = False
            self._tell(
                f"the file system of {self._path.parent} cannot punch holes: launch logs grow until the next launch, "
                "whatever [log] keep-launch-bytes says"
            )

    def _reserve(self, disk: Disk) -> None:
        wanted = os.fstat(self._file).st_size + disk.reserve
        if not self._can_reserve or wanted - self._reserved <= disk.reserve // 4:
            return
        got = reserved(self._file, disk.reserve)
        if got is None:
            self._can_reserve = False
            self._tell(f"the file system of {self._path.parent} reserves no space: a full disk would cost log lines")
        elif got == 0 and not self._full:
            self._tell(
                f"the disk of {self._path.parent} is full: what vLLM prints is lost, and a vLLM that starts fails; "
                "free some space"
            )
        self._full = got == 0
        if got:
            self._reserved = wanted - disk.reserve + got


def reserved(file: int, size: int) -> int | None:
    """Reserve ``size`` bytes behind the end of a file, or as much of them as there is: how many; ``None`` where the
    file system cannot.

    Raises:
        OSError: the disk failed.
    """
    end = os.fstat(file).st_size
    while size >= _LEAST:
        try:
            reserve(file, end, size)
        except OSError as error:  # noqa: PERF203 - a handful of tries
            if refused(error):
                return None
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            size //= 2
        else:
            return size
    return 0


def trim(path: Path) -> None:
    """Give back what is reserved behind the end of a log that nobody writes any more; it keeps its time. A disk that
    fails, or a log that is gone, changes nothing.
    """
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            before = os.fstat(file)
            os.ftruncate(file, before.st_size)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        finally:
            os.close(file)


def shorten(path: Path) -> None:
    """Give back the middle of a past log; where that cannot be, nothing happens."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            punch(file, HEAD_BYTES, os.fstat(file).st_size - END_BYTES)
        finally:
            os.close(file)
