"""Locks between daemons: one start at a time on a device, one daemon on a state directory.

Contract: `flock`, so a lock ends with its holder whatever happens to it; never waited for (the gate asks again);
several are taken in sorted order, all or none; the engine never inherits one (descriptors are closed on exec). Lock
files stay. The holder writes its pid into the file, for people: the lock itself is the kernel's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.host import procfs

LOCK_DIR = Path("/run/lock/vllm-supervise")
"""Shared by all users of the machine (mode 1777)."""


class LockHeld(Exception):  # noqa: N818 - an answer, not a mistake
    """Somebody else has it; ``owner`` is pid 0 where the file does not say who."""

    def __init__(self, what: str, owner: ProcessRef) -> None:
        super().__init__(f"{what} is locked by {owner}")
        self.what = what
        self.owner = owner


class LockError(Exception):
    """The lock file can't be made or opened; the text is one line that names it and the fix."""


class HeldLocks:
    """Locks that this process has, until `release`."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._descriptors = list(descriptors)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What holds them: who keeps these open keeps the locks, across an execve too."""
        return tuple(self._descriptors)

    def release(self) -> None:
        """Lets go of all of them; again is harmless."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def lock_dir(fallback: Path) -> Path:
    """Where device locks lie: the machine's folder if it is there or can be made, else in ``fallback`` (our runtime
    folder; then only daemons of this user see each other).

    Raises:
        LockError: neither can be used.
    """
    for folder, mode in ((LOCK_DIR, 0o1777), (fallback / "locks", 0o700)):
        with contextlib.suppress(OSError):
            made = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
            if made:
                folder.chmod(mode)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise LockError(f"no folder for device locks: neither {LOCK_DIR} nor {fallback / 'locks'} can be written")


def lock_devices(devices: Iterable[str], folder: Path) -> HeldLocks:
    """Takes the locks of all these devices (GPU or MIG UUIDs, ``host-memory``), or none.

    Raises:
        LockHeld: another daemon starts an engine on one of them.
        LockError: a lock file can't be opened.
    """
    taken: list[int] = []
    try:
        for device in sorted(set(devices)):
            descriptor = _take(folder / re.sub(r"[^A-Za-z0-9._-]", "_", device), device, 0o666)
            taken.append(descriptor)
    except BaseException:
        HeldLocks(taken).release()
        raise
    return HeldLocks(taken)


def lock_state(state_dir: Path) -> HeldLocks:
    """Makes this process the only daemon of a state directory.

    Raises:
        LockHeld: another daemon is; its text names it.
        LockError: the directory can't be written.
    """
    return HeldLocks([_take(state_dir / "lock", f"state directory {state_dir}", 0o600)])


def state_owner(state_dir: Path) -> ProcessRef | None:
    """The daemon of a state directory, ``None`` if there is none. Only looks: trying the lock could make a daemon that
    starts at the same moment believe that it is the second.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(state_dir / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            inode = str(os.fstat(descriptor).st_ino).encode()
            held = [line.split() for line in (procfs.read("/proc/locks") or b"").splitlines()]
            if any(b"FLOCK" in words and words[-3].endswith(b":" + inode) for words in held):
                return _owner(descriptor)
        finally:
            os.close(descriptor)
    return None


def _take(path: Path, what: str, mode: int) -> int:
    descriptor, writable = _open(path, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LockError(f"{path} is no regular file: remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(what, _owner(descriptor)) from None
        if writable:
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name on it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: Path, mode: int) -> tuple[int, bool]:
    """The file, and whether we may write who we are. It is opened before it is made: in a sticky folder the kernel
    refuses O_CREAT on another user's file (fs.protected_regular). A file that is only readable can be locked too."""
    common = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    attempts = ((os.O_RDWR, True), (os.O_RDWR | os.O_CREAT | os.O_EXCL, True), (os.O_RDWR, True), (os.O_RDONLY, False))
    reason = ""
    for flags, writable in attempts:
        try:
            descriptor = os.open(path, flags | common, mode)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        if flags & os.O_CREAT:
            os.fchmod(descriptor, mode)  # whatever our umask is
        return descriptor, writable
    raise LockError(f"cannot open the lock file {path}: {reason}")


def _owner(descriptor: int) -> ProcessRef:
    content = os.pread(descriptor, 32, 0).strip()
    if content.isdigit() and procfs.stat(int(content)) is not None:
        return procfs.describe(int(content))
    return ProcessRef(0, command="unknown process")
