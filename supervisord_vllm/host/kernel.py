"""What the kernel says: its log about GPUs and killed processes, and the counter of kills in our own cgroup.

Contract: read-only, never blocking, bounded. No access (a container without CAP_SYSLOG, no /dev/kmsg, no memory
controller) is absence, not failure: `KernelLog.open` says why, once. Lines are text of the kernel and of drivers; only
the forms below are taken, with digits and bus ids checked:

* ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, …`` and ``nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, …``;
* ``Out of memory: Killed process 1234 (name) …``, ``Memory cgroup out of memory: Killed process 1234 (name) …``, and
  since Linux 4.19 ``oom-kill:constraint=…,task=name,pid=1234,uid=0`` (skipped: the other line follows).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from supervisord_vllm.host import procfs
from supervisord_vllm.host.cgroup import own_group
from supervisord_vllm.redaction import printable

KMSG = Path("/dev/kmsg")
LINE_LIMIT = 300
BURST = 64
"""Records that are read in one turn: a driver in trouble can print thousands."""
_RECORD = 8192
"""A read of /dev/kmsg gives one record, or EINVAL where the buffer is too small for it."""
_XID = re.compile(r"(S?Xid) \(PCI:([0-9a-fA-F:.]{4,20})\): ([0-9]{1,6})\b")
_KILLED = re.compile(r"[Oo]ut of memory[^:]{0,40}: Kill(?:ed)? process ([0-9]{1,10}) \(")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line that matters; the fields are those of `core.facts.KernelSeen`."""

    kind: Literal["xid", "sxid", "oom_killer"]
    text: str
    bus_id: str = ""
    number: int | None = None
    pid: int | None = None


def bus_id(text: str) -> str:
    """A PCI address in one form: ``0000:3b:00``, whatever the domain's width and with or without the function."""
    parts = text.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    return f"{parts[0][-4:].zfill(4)}:{parts[1]}:{parts[2]}" if len(parts) == 3 else text.lower()


def parse(message: str) -> KernelLine | None:
    """The line of a record's message, or ``None`` for all that does not matter here."""
    text = printable(message[:LINE_LIMIT])
    if found := _XID.search(text):
        kind: Literal["xid", "sxid"] = "xid" if found[1] == "Xid" else "sxid"
        return KernelLine(kind, text, bus_id(found[2]), int(found[3]))
    if found := _KILLED.search(text):
        return KernelLine("oom_killer", text, pid=int(found[1]))
    return None


class KernelLog:
    """The kernel's log from now on. Give `fileno` to the loop's reader and call `read` when it is readable."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path = KMSG) -> KernelLog | str:
        """The log, or why it cannot be read."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return f"{path}: {error.strerror}"
        try:
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            os.close(descriptor)
            return f"{path}: {error.strerror}"
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._descriptor

    def read(self) -> list[KernelLine]:
        """What came since the last call, at most `BURST` records; a lost stretch of the log is passed over."""
        lines: list[KernelLine] = []
        for _ in range(BURST):
            try:
                record = os.read(self._descriptor, _RECORD)
            except BlockingIOError:
                break
            except BrokenPipeError:  # older records were overwritten: the next read goes on behind them
                continue
            except OSError:
                break
            if not record:
                break
            # "priority,sequence,microseconds,flags;message" and lines of properties that begin with a blank.
            _, _, message = record.decode("utf-8", "replace").partition(";")
            if (line := parse(message.partition("\n")[0])) is not None:
                lines.append(line)
        return lines

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of our memory cgroup (and below) the kernel has killed for memory so far; ``None`` where no
    memory controller says so. Of v2 it is our unit's memory.events: launches' own groups have no controllers."""
    ours = own_group(root)
    candidates = [] if ours is None else [ours / "memory.events"]
    inside = _v1_path((procfs.read(root / "proc/self/cgroup", 1 << 16) or b"").decode("utf-8", "replace"))
    if inside is not None:
        mount = root / "sys/fs/cgroup/memory"
        # What is mounted may be our own group already (a container, a bind mount): then the path is not below it.
        candidates += [mount / inside.lstrip("/") / "memory.oom_control", mount / "memory.oom_control"]
    for path in candidates:
        raw = procfs.read(path, 1 << 12)
        for line in (raw or b"").splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill" and value.strip().isdigit():
                return int(value)
    return None


def _v1_path(listed: str) -> str | None:
    for line in listed.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if "memory" in controllers.split(",") and ".." not in inside.split("/"):
            return inside
    return None
