"""The launch logs ``launches/NNNNNN.log``: their names, numbers and retention."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

_NAME = re.compile(r"[0-9]{6,12}\.log")


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


def prune_launch_logs(directory: Path, keep: int, max_bytes: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove the oldest logs beyond ``keep`` files or ``max_bytes`` in all (disk blocks, as holes cost nothing).

    The newest log and those in ``protect`` (the running launch, the first of an incident) stay whatever their size,
    though they count. Returns what was removed; a file that cannot be removed is left.
    """
    removed: list[Path] = []
    kept = kept_bytes = 0
    newest_first = launch_numbers(directory)[::-1]
    for number in newest_first:
        path = launch_log(directory, number)
        try:
            size = path.stat().st_blocks * 512
        except OSError:
            continue
        fits = kept < keep and kept_bytes + size <= max_bytes
        if not fits and number != newest_first[0] and number not in protect:
            try:
                path.unlink()
            except OSError:
                continue
            removed.append(path)
        else:
            kept += 1
            kept_bytes += size
    return removed
