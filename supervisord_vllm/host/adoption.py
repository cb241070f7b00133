"""What became of the engine that an earlier daemon recorded.

Identity is pid, start time and marker within one boot. A process that cannot be proven ours is not adopted: whatever of
ours there is will be ended by its marker, and a new engine started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from supervisord_vllm.engine.command import MARKER
from supervisord_vllm.host import cgroup, procfs
from supervisord_vllm.host.systemd import is_main_process

ADOPT = "SUPERVISE_ADOPT"
"""Set to 1 in a unit whose ``KillMode=process`` lets the engine outlive the daemon."""


@dataclass(frozen=True, slots=True)
class Found:
    """What became of it, and the marker that it carries (the instance's alone where that cannot be read any more)."""

    engine: Literal["none", "lives", "ended"]
    marker: str = ""


def outlives(environ: Mapping[str, str]) -> bool:
    """Whether an engine outlives its daemon, so that one that is gone has ended by itself. Under systemd's default
    ``KillMode`` it is ended with the daemon's unit."""
    return environ.get(ADOPT) == "1" or not is_main_process(environ)


def look(pid: int, start_ticks: int, instance: str, *, outlived: bool) -> Found:
    """Look for the main process of the recorded launch; ``outlived`` says what one that is gone means."""
    found = procfs.stat(pid)
    same = found is not None and found.start_ticks == start_ticks
    if same and found is not None and found.alive:
        marker = _marker(pid, instance)
        if marker is None and not cgroup.member(pid, instance):
            return Found("none")
        return Found("lives", marker or f"{instance}.")
    if same and found is not None and found.ppid == os.getpid():
        return Found("ended", f"{instance}.")  # our own child, from before an execve: its status is kept for us
    return Found("ended" if outlived else "none", f"{instance}.")


def _marker(pid: int, instance: str) -> str | None:
    prefix = f"{MARKER}={instance}.".encode()
    for entry in (procfs.environ(pid) or b"").split(b"\0"):
        if entry.startswith(prefix):
            return entry.partition(b"=")[2].decode("utf-8", "replace")
    return None
