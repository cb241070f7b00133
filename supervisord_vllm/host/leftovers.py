"""Files that dead owners left in the way of the next start: locks in caches, and shared-memory segments.

Contract: nothing is touched that could still be somebody's. A file is a leftover only if nobody has it open, mapped or
locked and it belongs to our user. A segment must besides have been seen mapped by a process of our own launch (names in
/dev/shm do not tell whose they are); it is removed, since moved aside it would keep its memory. A lock must be older
than the look; it is moved aside, and the next look removes what the one before moved, so that it does not pile up.

Locks: torch's and aiter's batons (``lock``, ``*.lock`` that exist while one process compiles; after a KILL the next
start waits for ever), and the hub's. Seen: cases 105, 106 of public reports; both waited without a time-out.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from supervisord_vllm.host import procfs

ASIDE = ".stale-vllm-supervise"
"""What the name of a moved file ends with."""
OLDEST_LOOK = 20_000
"""Directory entries that one look reads at most."""
YOUNG_S = 5.0
"""A lock that was made within this may have an owner that only has not opened it yet."""
SHM = Path("/dev/shm")  # noqa: S108 - looked at, nothing is made there


def caches(env: Mapping[str, str]) -> list[Path]:
    """Where an engine with this environment keeps compiled code and downloads."""
    home = Path(env.get("HOME") or "/nonexistent")
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(env.get("HF_HUB_CACHE") or Path(env.get("HF_HOME") or cache / "huggingface") / "hub")
    found = [
        Path(env.get("VLLM_CACHE_ROOT") or cache / "vllm"),
        Path(env.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions"),
        Path(env.get("TRITON_CACHE_DIR") or home / ".triton"),
        Path(env.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        hub,
    ]
    if inductor := env.get("TORCHINDUCTOR_CACHE_DIR"):
        found.append(Path(inductor))
    return [path for path in dict.fromkeys(found) if path.is_dir()]


def size_bytes(folders: Iterable[Path]) -> int:
    """What the files below these folders hold, as far as `OLDEST_LOOK` entries show."""
    return sum(info.st_size for _, info in _files(folders))


def segments(pids: Iterable[int], shm: Path = SHM) -> frozenset[str]:
    """Names of the shared-memory segments that these processes have mapped.

    They are found by inode: glibc makes a semaphore under another name, links it to its own and unlinks the first, so
    that a mapping's path is ``/dev/shm/sem.zSLWq2 (deleted)`` while the file is ``sem.mp-…``.
    """
    mapped: set[int] = set()
    prefix = f" {shm}/".encode()
    for pid in pids:
        for line in (procfs.read(procfs.PROC / str(pid) / "maps", 32 << 20) or b"").splitlines():
            if prefix in line:
                mapped.add(int(line.split(None, 5)[4]))
    if not mapped:
        return frozenset()
    try:
        with os.scandir(shm) as entries:
            return frozenset(entry.name for entry in entries if entry.inode() in mapped)
    except OSError:
        return frozenset()


def clear_segments(names: Iterable[str], shm: Path = SHM) -> tuple[str, ...]:
    """Removes the segments of dead processes that nobody has open or mapped, as their resource tracker would have if
    it had not been killed with them; returns their paths."""
    found = {
        path: inode
        for name in names
        if "/" not in name and (inode := _inode(path := shm / name)) is not None and _ours(path)
    }
    if not found:
        return ()
    mapped, used = segments(procfs.pids(), shm), _in_use(set(found.values()))
    removed: list[str] = []
    for path, inode in sorted(found.items()):
        if path.name not in mapped and inode not in used:
            path.unlink(missing_ok=True)
            removed.append(str(path))
    return tuple(removed)


def clear_locks(folders: Iterable[Path]) -> tuple[str, ...]:
    """Moves aside locks without an owner below these folders; returns their paths."""
    young = time.time() - YOUNG_S
    found: dict[Path, tuple[int, int]] = {}
    for path, info in _files(folders):
        if path.name.endswith(ASIDE):
            if _ours(path):
                path.unlink(missing_ok=True)
        elif (path.name == "lock" or path.name.endswith(".lock")) and info.st_mtime < young and _ours(path):
            found[path] = (info.st_dev, info.st_ino)
    return _move_unused(found)


def _move_unused(found: Mapping[Path, tuple[int, int]]) -> tuple[str, ...]:
    used = _in_use(set(found.values())) if found else set()
    moved: list[str] = []
    for path, inode in sorted(found.items()):
        if inode not in used:
            try:
                path.rename(path.with_name(path.name + ASIDE))
            except OSError:
                continue
            moved.append(str(path))
    return tuple(moved)


def _files(folders: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    left = OLDEST_LOOK
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                left -= 1
                if left < 0:
                    return
                path = Path(place, name)
                try:
                    info = path.lstat()
                except OSError:
                    continue
                if stat.S_ISREG(info.st_mode):
                    yield path, info


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if stat.S_ISREG(info.st_mode) else None


def _ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _in_use(inodes: set[tuple[int, int] | None]) -> set[tuple[int, int]]:
    """Those that some process has open. A descriptor that may not be looked at counts for nothing: its owner is another
    user, and the file is ours."""
    found: set[tuple[int, int]] = set()
    for pid in procfs.pids():
        try:
            entries = os.scandir(procfs.PROC / str(pid) / "fd")
        except OSError:
            continue
        with entries:
            for entry in entries:
                try:
                    info = entry.stat()
                except OSError:
                    continue
                if (info.st_dev, info.st_ino) in inodes:
                    found.add((info.st_dev, info.st_ino))
    return found
