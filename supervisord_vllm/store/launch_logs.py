"""The launch logs ``launches/NNNNNN.log``: their names, numbers and retention, and the file for the next one.

The file for the next launch, ``launches/next``, lies ready with its disk space reserved: a launch can begin, and print,
on a disk that others filled meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from supervisord_vllm.store.log_space import Disk, reserved, shorten, trim

_NAME = re.compile(r"[0-9]{6,12}\.log")
_NEXT: Final = "next"


def launch_log(directory: Path, number: int) -> Path:
    """Where the output of one launch lies."""
    return directory / f"{number:06d}.log"


def launch_numbers(directory: Path) -> list[int]:
    """The numbers of the logs that exist, ascending; a directory that is not there or unreadable has none."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    return sorted(int(name[:-4]) for name in names if _NAME.fullmatch(name))


def written_numbers(directory: Path) -> list[int]:
    """The numbers of the logs that say anything, ascending: an empty one may be space kept for a launch to come, and
    nothing is lost if that launch gets it."""
    written: list[int] = []
    for number in launch_numbers(directory):
        with contextlib.suppress(OSError):
            if launch_log(directory, number).stat().st_size:
                written.append(number)
    return written


def prune_launch_logs(
    directory: Path, keep: int, max_bytes: int, protect: Collection[int] = (), firsts: Collection[int] = ()
) -> list[Path]:
    """Remove the oldest logs beyond ``keep`` files or ``max_bytes`` in all (disk blocks, as holes cost nothing).

    The newest log and those in ``protect`` (the running launch, the first of the incident that goes on) stay whatever
    their size, though they count. ``firsts``, the first launches of incidents, show causes, the others repetitions:
    half of the files and of the bytes is theirs before any other's. Returns what was removed; a file that cannot be
    removed is left.
    """
    sizes: dict[int, int] = {}
    for number in launch_numbers(directory):
        with contextlib.suppress(OSError):
            sizes[number] = launch_log(directory, number).stat().st_blocks * 512
    newest_first = sorted(sizes, reverse=True)
    kept = set(newest_first[:1])
    used = sum(sizes[number] for number in kept)
    for candidates, files, size in (
        ([number for number in newest_first if number in firsts], keep // 2, max_bytes // 2),
        (newest_first, keep, max_bytes),
    ):
        for number in candidates:
            fits = len(kept) < files and used + sizes[number] <= size
            if number not in kept and (fits or number in protect):
                kept.add(number)
                used += sizes[number]
    removed: list[Path] = []
    for number in newest_first:
        if number not in kept:
            with contextlib.suppress(OSError):
                launch_log(directory, number).unlink()
                removed.append(launch_log(directory, number))
    return removed


def shorten_past_logs(directory: Path, present: int) -> None:
    """Of the logs before a launch's keep only heads and ends: the disk is low."""
    for number in launch_numbers(directory):
        if number < present:
            shorten(launch_log(directory, number))


def prepare_launch_log(directory: Path, number: int) -> Path:
    """The log of a launch that is about to begin, with its space reserved where that can be, and that of the one after
    it. No other launch of this directory lives. Blocking; a disk that fails changes nothing: then the engine's log is
    made when it is executed.
    """
    log = launch_log(directory, number)
    with contextlib.suppress(OSError):
        for past in launch_numbers(directory)[-1:]:
            trim(launch_log(directory, past))
        disk = Disk.of(directory)
        if disk.free < disk.low_mark:
            shorten_past_logs(directory, number)
        if not log.exists():
            with contextlib.suppress(FileNotFoundError):
                (directory / _NEXT).rename(log)
        _reserve(log, disk.reserve)
        if not _reserve(directory / _NEXT, disk.reserve):
            (directory / _NEXT).unlink()
    return log


def _reserve(path: Path, size: int) -> int | None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        return reserved(file, size)
    finally:
        os.close(file)
