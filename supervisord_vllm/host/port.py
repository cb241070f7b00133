"""Who has the engine's port.

Contract: the answer to "could vLLM bind it" comes from binding it, as vLLM does (SO_REUSEADDR, so TIME_WAIT is no
owner) but without SO_REUSEPORT: an orphan that shares the port would swallow every other connection. /proc only names
the owner; where it can't (another user's process, another network namespace's view), the owner is pid 0, "unknown
process". The port is held for microseconds, never listened on.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress

from supervisord_vllm.core.facts import ProcessRef
from supervisord_vllm.host import procfs

UNKNOWN = ProcessRef(0, command="unknown process")
_LISTEN, _TIME_WAIT = "0A", "06"
_ANY = ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound


async def port_owner(host: str | None, port: int) -> ProcessRef | None:
    """The process that keeps vLLM from listening on ``host:port``, ``None`` if nothing does.

    ``host`` is a name or an address; ``None`` and ``""`` are all of IPv4, as for vLLM.
    """
    return await asyncio.to_thread(_port_owner, host or "", port)


async def socket_owner(path: str) -> ProcessRef | None:
    """The process that listens on a Unix socket; ``None`` where nobody answers (a stale file is no owner)."""
    return await asyncio.to_thread(_socket_owner, path)


def _port_owner(host: str, port: int) -> ProcessRef | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or _ANY[0], port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        return None  # no such host: vLLM will say so
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            return None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return None  # not our address, or a port for root only: not taken by anybody
    for inode in _candidates(port, str(address[0])):
        pid = _pid_of(inode)
        if pid is not None:
            return procfs.describe(pid)
    return UNKNOWN


def _candidates(port: int, address: str) -> list[str]:
    """Inodes of sockets on the port, the likeliest first: listeners before connections, on the same address or on all
    addresses before others."""
    found: list[tuple[bool, bool, str]] = []
    for table in ("tcp", "tcp6"):
        for local, state, inode in _sockets(table, port):
            if state != _TIME_WAIT and inode != "0":
                related = local == address or local in _ANY or address in _ANY
                found.append((state != _LISTEN, not related, inode))
    return [inode for _, _, inode in sorted(found)]


def _sockets(table: str, port: int) -> Iterator[tuple[str, str, str]]:
    """(local address, state, inode) of each socket with this local port, from /proc/net."""
    for line in (procfs.read(f"/proc/self/net/{table}", 64 << 20) or b"").decode().splitlines()[1:]:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if int(number, 16) == port:
            yield _address(address), fields[3], fields[9]


def _address(text: str) -> str:
    """An address of /proc/net, whose 32-bit words are in the machine's byte order; ``::ffff:a.b.c.d`` as IPv4."""
    words = struct.pack(f"={len(text) // 8}I", *(int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    if len(words) == 16 and words.startswith(b"\0" * 10 + b"\xff\xff"):
        words = words[12:]
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def _pid_of(inode: str) -> int | None:
    """The process with the lowest pid that has the socket open."""
    wanted = f"socket:[{inode}]"
    for pid in sorted(procfs.pids()):
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with suppress(OSError):
                    if os.readlink(entry.path) == wanted:  # noqa: PTH115 - thousands of them: no Path for each
                        return pid
    return None


def _socket_owner(path: str) -> ProcessRef | None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            return UNKNOWN  # its queue is full: somebody listens
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return procfs.describe(pid) if pid > 0 else UNKNOWN
