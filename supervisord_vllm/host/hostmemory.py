"""Host memory as a CPU engine will see it: the machine's, within the memory cgroup's limit.

Contract: total is the least of the memory node and every limit above us; free is the least of what the node has
available and what is left below each limit. vLLM's CPU build (0.32 ``utils/cpu_resource_utils.py``) reads the limit at
the *root* of the mounted hierarchy (what a container or a bind mount shows there) and takes the whole usage off it,
page cache included: there we count as it does, for it refuses on that number. A limit further down (a systemd unit's)
is only enforced by the kernel, which drops inactive page cache first: there that cache counts as free.

Both cgroup versions and the layouts of systemd are known: v2 alone, v1, and hybrid (v1 controllers beside a v2 tree).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.core.facts import DeviceMemory, ProcessRef
from supervisord_vllm.host import procfs
from supervisord_vllm.host.memory import MemoryUnavailable

DEVICE = "host-memory"
CONTEXT_BYTES = 9 * (1 << 30) // 10
"""First guess of what vLLM's own imports take before it looks at free memory (0.8 GiB seen with 0.32)."""
HOLDERS = 8
"""Biggest processes that are named."""
_HOLDER_MIN = 64 << 20
_PSS_MAX = 16 << 30
"""Above this resident size the exact share is not asked for: the kernel walks every page of the process for it."""
_UNLIMITED = 1 << 62
"""cgroup v1 has no word for "no limit" but a number near the largest; vLLM draws the line here too."""
_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Limit:
    """One cgroup with a memory limit. ``cache_bytes`` is page cache that the kernel would drop first; ``visible`` says
    that vLLM reads this limit too."""

    path: Path
    limit_bytes: int
    usage_bytes: int
    cache_bytes: int
    visible: bool

    @property
    def left_bytes(self) -> int:
        """What can still be taken below this limit."""
        used = self.usage_bytes if self.visible else self.usage_bytes - self.cache_bytes
        return max(0, self.limit_bytes - used)


def _number(path: Path) -> int | None:
    raw = procfs.read(path, 64)
    return int(raw) if raw is not None and raw.strip().isdigit() else None


def _inactive_file(path: Path) -> int:
    lines = (procfs.read(path / "memory.stat", 1 << 16) or b"").splitlines()
    values = dict(line.split(maxsplit=1) for line in lines if b" " in line)
    return int(values.get(b"total_inactive_file", values.get(b"inactive_file", b"0")))  # v1 counts children apart


def _limit(path: Path, *, visible: bool) -> Limit | None:
    for limit_name, usage_name in (_V2, _V1):
        limit, usage = _number(path / limit_name), _number(path / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            return Limit(path, limit, usage, _inactive_file(path), visible)
    return None


def _meminfo(path: Path) -> dict[str, int]:
    """A meminfo file in bytes; a node's lines begin with ``Node 0 ``."""
    lines = (procfs.read(path, 1 << 16) or b"").decode("ascii", "replace").splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.split()[-1]: int(value.split()[0]) << 10 for name, value in pairs}


class HostMemory:
    """The memory of this machine for a process of this cgroup. ``root`` replaces ``/`` in tests."""

    name = "host"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def sample(self, own_pids: frozenset[int]) -> tuple[DeviceMemory, ...]:
        """One look; the only device is ``host-memory``."""
        total, free = self._machine()
        limits = [limit for limit in self.limits() if limit.limit_bytes < total]
        tightest = min(limits, key=lambda limit: (limit.left_bytes, limit.limit_bytes), default=None)
        return (
            DeviceMemory(
                device=DEVICE,
                total_bytes=min([total, *(limit.limit_bytes for limit in limits)]),
                free_bytes=min([free, *(limit.left_bytes for limit in limits)]),
                context_bytes=CONTEXT_BYTES,
                own_bytes=sum(_own_bytes(pid) for pid in own_pids),
                holders=_holders(tightest, own_pids),
            ),
        )

    def limits(self) -> list[Limit]:
        """Every memory limit that applies to us, the innermost first, the mounts' roots last."""
        found: dict[Path, Limit] = {}
        for path, visible in self._groups():
            limit = _limit(path, visible=visible)
            if limit is not None:
                found[path] = limit
        return list(found.values())

    def _machine(self) -> tuple[int, int]:
        """Total and available of the memory node that a worker of vLLM uses; of the machine where it has no nodes.

        vLLM adds up MemFree, both file lists and SReclaimable of the node (``get_memory_node_info``).
        """
        node = self._node()
        if node is not None:
            try:
                fields = _meminfo(node)
                parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
                return fields["MemTotal"], sum(fields[part] for part in parts)
            except (KeyError, ValueError, IndexError):
                pass  # a node without memory, or a kernel that tells less: the machine's own account
        try:
            fields = _meminfo(self._root / "proc/meminfo")
            return fields["MemTotal"], fields["MemAvailable"]
        except (KeyError, ValueError, IndexError):
            raise MemoryUnavailable(f"{self._root / 'proc/meminfo'} names no MemTotal and MemAvailable") from None

    def _node(self) -> Path | None:
        """The account of the first memory node that we may use, or ``None``."""
        status = (procfs.read(self._root / "proc/self/status", 1 << 16) or b"").decode("ascii", "replace")
        allowed = next((line for line in status.splitlines() if line.startswith("Mems_allowed_list:")), "")
        first = re.search(r"\d+", allowed)
        path = self._root / f"sys/devices/system/node/node{first.group() if first else 0}/meminfo"
        return path if path.exists() else None

    def _groups(self) -> Iterator[tuple[Path, bool]]:
        """Our cgroup and its parents in the v1 memory hierarchy and in the v2 tree, down from us to the mount's root.

        The path in /proc/self/cgroup need not exist below the mount (a container without its own cgroup namespace, a
        bind mount): then what is mounted is all that can be seen.
        """
        mount = self._root / "sys/fs/cgroup"
        unified = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        trees = {"memory": mount / "memory", "": unified}
        listed = (procfs.read(self._root / "proc/self/cgroup", 1 << 16) or b"").decode("utf-8", "replace")
        for line in listed.splitlines():
            _, _, rest = line.partition(":")
            controllers, _, inside = rest.partition(":")
            for controller in controllers.split(","):
                if (tree := trees.get(controller)) is None or ".." in inside:
                    continue
                path = tree / inside.lstrip("/")
                while path != tree:
                    if path.is_dir():
                        yield path, False
                    path = path.parent
        yield trees["memory"], True
        yield unified, unified == mount


def _own_bytes(pid: int) -> int:
    resident = procfs.rss_bytes(pid)
    if resident > _PSS_MAX:
        return resident
    return procfs.pss_bytes(pid) or resident


def _members(group: Path) -> set[int]:
    """Processes in a cgroup and below."""
    found: set[int] = set()
    for folder, _, _ in os.walk(group):
        found.update(int(number) for number in (procfs.read(Path(folder) / "cgroup.procs") or b"").split())
    return found


def _holders(limit: Limit | None, own_pids: frozenset[int]) -> tuple[ProcessRef, ...]:
    """The biggest processes among those that share the tightest limit (without one: the machine), the largest first;
    page cache that vLLM counts as used is named too, as pid 0."""
    everyone = set(procfs.pids()) if limit is None else _members(limit.path)
    sizes = [(size, pid) for pid in everyone if (size := procfs.rss_bytes(pid)) >= _HOLDER_MIN]
    sizes.sort(key=lambda item: (-item[0], item[1]))
    holders = [procfs.describe(pid, memory_bytes=size, ours=pid in own_pids) for size, pid in sizes[:HOLDERS]]
    if limit is not None and limit.visible and limit.cache_bytes >= _HOLDER_MIN:
        holders.append(ProcessRef(0, command="page cache", memory_bytes=limit.cache_bytes))
        holders.sort(key=lambda holder: -(holder.memory_bytes or 0))
    return tuple(holders)
