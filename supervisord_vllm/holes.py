"""Space inside and behind a file that is being written: holes punched where it was read, blocks reserved at its end.

Contract: neither changes the size nor any position of the file, so that whoever appends to it or reads it at an offset
notices nothing. Linux only (ext4, xfs, btrfs and tmpfs can do both); where a file system cannot, `OSError` says so.
Reading: a hole is no text, so a reader goes from one stretch of data to the next. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from typing import Final

_KEEP_SIZE = 0x1
_PUNCH_HOLE = 0x2
_BLOCK: Final = 4096
_LARGEST_BLOCK: Final = 2 << 20
_REFUSED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.ENODEV})


def refused(error: OSError) -> bool:
    """Whether the file system cannot do it at all, as against a full or failing disk."""
    return error.errno in _REFUSED


def punch(file: int, start: int, end: int) -> tuple[int, int]:
    """Give back the blocks that lie wholly within ``start`` and ``end`` (positions in bytes; the descriptor must be
    writable). Returns the hole, which may be empty: only whole blocks go, so that no reader meets zeros beside it.

    Raises:
        OSError: the file system cannot punch (`refused`), or the disk failed.
    """
    block = min(max(os.fstat(file).st_blksize, _BLOCK), _LARGEST_BLOCK)
    first, last = -(-start // block) * block, end // block * block
    if last <= first:
        return first, first
    _fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, first, last - first)
    return first, last


def reserve(file: int, start: int, size: int) -> None:
    """Have ``size`` bytes of disk ready from ``start`` on, also beyond the end of the file, whose size stays.

    Raises:
        OSError: ENOSPC where the disk has not that much, or the file system cannot (`refused`).
    """
    _fallocate(file, _KEEP_SIZE, start, size)


def _fallocate(file: int, mode: int, start: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", libc.fallocate)
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(file, mode, start, size) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def data_from(file: int, position: int) -> tuple[int, int] | None:
    """The first stretch of data at or after a position: where it begins and where the next hole does, which may be the
    end of the file. ``None`` where only a hole or nothing follows.

    Raises:
        OSError: the descriptor is of no file that can be sought in.
    """
    try:
        begin = os.lseek(file, position, os.SEEK_DATA)
        return begin, os.lseek(file, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:  # a file system that knows of no holes has none
            size = os.fstat(file).st_size
            return (position, size) if position < size else None
        raise


class DataReader:
    """The text of a file without its holes, for whoever reads it front to back; anything but a regular file as it is.

    A line that a hole cut short ends there, and the fragment behind the hole is left out up to its newline. ``notice``
    makes what stands at the place of a hole from the number of bytes that are missing (default: nothing). Like the file
    itself it can be read on after its end, once the file has grown.
    """

    def __init__(self, file: int, notice: Callable[[int], bytes] = lambda _: b"") -> None:
        self._file = file
        self._notice = notice
        self._seekable = stat.S_ISREG(os.fstat(file).st_mode)
        self._position = os.lseek(file, 0, os.SEEK_CUR) if self._seekable else 0
        self._line_ended = True
        self._in_fragment = False

    def fileno(self) -> int:
        """The descriptor, which stays the caller's."""
        return self._file

    def tell(self) -> int:
        """The position up to which the file was read, holes included."""
        return self._position

    def read(self, size: int, /) -> bytes:
        """Some bytes, at most ``size`` (a notice may be longer); none at the end of what is there now."""
        if not self._seekable:
            return os.read(self._file, size)
        while (stretch := data_from(self._file, self._position)) is not None:
            begin, end = stretch
            if begin > self._position:
                told = (b"" if self._line_ended else b"\n") + self._notice(begin - self._position)
                self._position, self._line_ended, self._in_fragment = begin, True, True
                if told:
                    return told
            data = os.pread(self._file, min(size, end - begin), begin)
            self._position += len(data)
            if self._in_fragment:
                _, newline, data = data.partition(b"\n")
                self._in_fragment = not newline
            if data:
                self._line_ended = data.endswith(b"\n")
                return data
        return b""
