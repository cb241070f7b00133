"""Reading /proc: what a process is, in the few words that the host side needs.

Contract: nothing here raises for a process that is gone or not readable (the answer is ``None`` or empty), nothing here
blocks on another process, and every text that comes from another process is bounded, printable and free of arguments
that could hold a secret. ``start_ticks`` is field 22 of /proc/PID/stat (clock ticks since boot): pid and start together
name one process for ever within a boot.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath

from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.redaction import printable

PROC = Path("/proc")
NAME_LIMIT = 60
"""Characters of a command that are shown."""
_READ_LIMIT = 4 << 20
"""Bytes of one file in /proc that are read: an environment can be 2 MiB by default (a quarter of the stack limit)."""
_INTERPRETERS = ("python", "bash", "sh", "dash", "node", "perl", "ruby", "java", "uv")


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that matter here."""

    pid: int
    state: str
    ppid: int
    session: int
    threads: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """Whether it still runs: a zombie is only a number, unless it is the leader of threads that still live."""
        return self.state not in "ZX" or self.threads > 1


def read(path: str | Path, limit: int = _READ_LIMIT) -> bytes | None:
    """A file's bytes, at most ``limit``; ``None`` if it can't be read (gone, not permitted)."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - thousands of them: no Path for each
            parts: list[bytes] = []
            while limit > 0 and (part := file.read(min(limit, 1 << 17))):
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)
    except OSError:
        return None


def pids() -> Iterator[int]:
    """Every process id that is visible now."""
    for name in os.listdir(PROC):  # noqa: PTH208 - as above
        if name.isdigit():
            yield int(name)


def stat(pid: int) -> Stat | None:
    """The process' state, or ``None`` once it is gone. The name in the second field may hold blanks and brackets, so
    fields are counted from the last bracket."""
    raw = read(PROC / str(pid) / "stat")
    if not raw:
        return None
    fields = raw[raw.rindex(b")") + 2 :].split()
    return Stat(
        pid=pid,
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def stats() -> dict[int, Stat]:
    """One look at every process."""
    return {pid: found for pid in pids() if (found := stat(pid)) is not None}


def environ(pid: int) -> bytes:
    """The environment that the process was executed with, NUL-separated; empty where it can't be read."""
    return read(PROC / str(pid) / "environ") or b""


def cmdline(pid: int) -> list[str]:
    """The argument vector, or what the process wrote over it (its title); empty for kernel threads and zombies."""
    raw = (read(PROC / str(pid) / "cmdline", 1 << 16) or b"").rstrip(b"\0 ")
    return [part.decode("utf-8", "replace") for part in raw.split(b"\0")] if raw else []


def children(pid: int | str = "self") -> list[int]:
    """Direct children. The kernel's list is used where it is built in (CONFIG_PROC_CHILDREN), else every process is
    looked at."""
    found: list[int] = []
    tasks = PROC / str(pid) / "task"
    try:
        for task in tasks.iterdir():
            found.extend(int(number) for number in (task / "children").read_bytes().split())
    except FileNotFoundError:
        parent = os.getpid() if pid == "self" else int(pid)
        return [one.pid for one in stats().values() if one.ppid == parent]
    except OSError:
        return []
    return found


def _shown(text: str) -> str:
    return printable(text[:NAME_LIMIT])


def short_command(argv: list[str]) -> str:
    """A name that an operator recognises, without arguments (they can hold keys): the program, and for an interpreter
    the module or script that it runs. ``python3 -m vllm.entrypoints…``, ``python3 hog.py``, ``VLLM::EngineCore``."""
    if not argv:
        return ""
    if len(argv) == 1 and " " in argv[0]:  # a title, such as "nginx: worker process"
        return _shown(argv[0])
    name = PurePath(argv[0].lstrip("-")).name or argv[0]
    if name.startswith(_INTERPRETERS):
        for index, argument in enumerate(argv[1:], 1):
            if argument == "-c":
                return _shown(f"{name} -c")
            if argument == "-m" and index + 1 < len(argv):
                return _shown(f"{name} -m {argv[index + 1]}")
            if not argument.startswith("-"):
                return _shown(f"{name} {PurePath(argument).name}")
    return _shown(name)


@lru_cache(maxsize=256)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


def describe(pid: int, *, memory_bytes: int | None = None, ours: bool = False) -> ProcessRef:
    """The process as an operator would look for it. May ask the name service for the user: not for the event loop."""
    name = (read(PROC / str(pid) / "comm") or b"").decode("utf-8", "replace").strip()
    command = short_command(cmdline(pid)) or _shown(name)
    try:
        user = _user_name((PROC / str(pid)).stat().st_uid)
    except OSError:
        user = ""
    return ProcessRef(pid=pid, user=user, command=command, memory_bytes=memory_bytes, ours=ours)


def cpu_ns(pid: int) -> int:
    """Processor time that the process has used (user and system, its dead threads too), in nanoseconds; 0 once gone."""
    raw = read(PROC / str(pid) / "stat")
    if not raw:
        return 0
    fields = raw[raw.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def waits(pid: int) -> str:
    """A process's state for people, with the place in the kernel where it waits, if it may be read: ``D in
    nvidia_ioctl``. Empty once it is gone."""
    found = stat(pid)
    if found is None:
        return ""
    place = (read(PROC / str(pid) / "wchan", 128) or b"").decode("ascii", "replace").strip()
    return f"{found.state} in {_shown(place)}" if place not in ("", "0") else found.state


def rss_bytes(pid: int) -> int:
    """Resident memory in bytes (statm); 0 once the process is gone."""
    raw = read(PROC / str(pid) / "statm")
    return int(raw.split()[1]) * os.sysconf("SC_PAGE_SIZE") if raw else 0


def pss_bytes(pid: int) -> int | None:
    """Resident memory with shared pages divided among those who share them, in bytes; ``None`` where not readable."""
    raw = read(PROC / str(pid) / "smaps_rollup")
    for line in (raw or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return None
