"""Up to where the engine's output was copied to standard output: ``launches/copied``, one short line in place.

Contract: the file is made in full at once and then only overwritten, so that a full disk does not stop it (but for a
file system that never overwrites, as btrfs). It is written after each line that was copied. A daemon that was killed
leaves a place before which every line was copied or counted as dropped, and behind which none was copied. Two kills
double a line: one in the microseconds between the two writes, and one within the write of a line to a reader so slow
that it took it in parts.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

_NAME: Final = "copied"
_RECORD = re.compile(rb"(\d{12}) (\d{20})\n")


class Place(NamedTuple):
    """A position (bytes) in the log of a launch."""

    launch: int
    position: int


class CopiedCursor:
    """The one who writes it; its methods never raise, but the first.

    Raises:
        OSError: the file cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / _NAME
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _read(self._file) is None:
                os.pwrite(self._file, _record(Place(0, 0)), 0)
        except OSError:
            os.close(self._file)
            raise

    def keep(self, place: Place) -> None:
        """Everything before this place was copied or dropped."""
        with contextlib.suppress(OSError):  # a failing disk: then lines are doubled after a crash, no more
            os.pwrite(self._file, _record(place), 0)

    def close(self) -> None:
        """Keep nothing more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def copied_position(directory: Path, launch: int) -> int | None:
    """The position in a launch's log from which it was not copied yet; ``None`` where nobody kept it.

    Nothing of a launch after the one that was noted has been copied: 0.
    """
    try:
        file = os.open(directory / _NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        place = _read(file)
    except OSError:
        return None
    finally:
        os.close(file)
    if place is None or place.launch > launch:
        return None
    return place.position if place.launch == launch else 0


def _record(place: Place) -> bytes:
    return b"%012d %020d\n" % place


def _read(file: int) -> Place | None:
    match = _RECORD.fullmatch(os.pread(file, 64, 0))
    return Place(int(match[1]), int(match[2])) if match else None
