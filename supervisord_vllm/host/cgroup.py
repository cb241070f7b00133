"""A launch's own cgroup: membership is inherited by every fork, so neither a double fork nor setsid leaves it.

Contract: used in the v2 tree (alone, or the hybrid layout's beside v1 controllers) where our own cgroup is delegated to
us; elsewhere there is none and the marker, the session and descent must do. It is named
``supervise-INSTANCE.UUID`` after the launch's marker and is made below our own cgroup. No controller is enabled (the
unit's next start would fail on that) and nothing is limited. Nothing here raises; a group that cannot be made is
``None``.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from supervisord_vllm.host import procfs

PREFIX = "supervise-"
_ROOT = Path("/")
_DELEGATED = ("trusted.delegate", "user.delegate")
"""systemd's mark on a cgroup that it leaves to its unit (Delegate=yes)."""
_CONTROL = ".control"
"""Where systemd runs the other commands of a unit with a delegated cgroup (ExecStopPost=): below that of its daemon."""


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """One launch's cgroup."""

    path: Path

    def add(self, pid: int) -> bool:
        """Moves a process in; whether that worked. What it forked before stays outside, and is ours by other proof."""
        return _write(self.path / "cgroup.procs", str(pid))

    def kill(self) -> bool:
        """KILLs every member at once, forks in flight included (Linux 5.14 and later); whether the kernel can."""
        return _write(self.path / "cgroup.kill", "1")

    def members(self) -> list[int]:
        """Who is in it, or in groups that the engine made below it; what was killed and not collected yet is not."""
        found: list[int] = []
        for folder, _, _ in os.walk(self.path):
            found.extend(int(word) for word in (procfs.read(Path(folder, "cgroup.procs"), 1 << 20) or b"").split())
        return found

    def remove(self) -> bool:
        """Removes the empty group; False while somebody is in it."""
        return _remove(self.path)


def make(marker: str, root: Path = _ROOT) -> LaunchGroup | None:
    """A new group for a launch, or ``None`` where we may not have one. ``root`` replaces ``/`` in tests."""
    ours = own_group(root)
    if ours is None or not _delegated(ours, root):
        return None
    path = ours / f"{PREFIX}{marker}"
    try:
        path.mkdir()
    except OSError:
        return None
    return LaunchGroup(path)


def own_group(root: Path = _ROOT) -> Path | None:
    """Our cgroup in the v2 tree, for a unit's other commands that of its daemon; ``None`` where none is mounted or ours
    is outside what is mounted."""
    mount = root / "sys/fs/cgroup"
    tree = next((tree for tree in (mount, mount / "unified") if (tree / "cgroup.controllers").exists()), None)
    inside = _v2_path(procfs.read(root / "proc/self/cgroup", 1 << 16) or b"")
    if tree is None or inside is None or ".." in inside.split("/"):
        return None
    path = tree / inside.lstrip("/")
    if path.name == _CONTROL:
        path = path.parent
    return path if path.is_dir() else None


def of_marker(marker: str, root: Path = _ROOT) -> LaunchGroup | None:
    """The group that a launch was given, by its marker: what a daemon that adopts an engine has to look for."""
    ours = own_group(root)
    path = None if ours is None else ours / f"{PREFIX}{marker}"
    return LaunchGroup(path) if path is not None and path.is_dir() else None


def member(pid: int, instance: str) -> bool:
    """Whether a process is in a group of one of this instance's launches."""
    inside = _v2_path(procfs.read(procfs.PROC / str(pid) / "cgroup", 1 << 16) or b"")
    return inside is not None and f"/{PREFIX}{instance}." in inside


def of_instance(instance: str, root: Path = _ROOT) -> list[LaunchGroup]:
    """The groups that launches of this instance made below our own cgroup, earlier daemons' too."""
    ours = own_group(root)
    if ours is None:
        return []
    try:
        return [LaunchGroup(path) for path in sorted(ours.glob(f"{PREFIX}{instance}.*"))]
    except OSError:
        return []


def remove_empty(instance: str, root: Path = _ROOT) -> None:
    """Removes what earlier launches of this instance left; groups that still have members stay."""
    for group in of_instance(instance, root):
        group.remove()


def _v2_path(listed: bytes) -> str | None:
    for line in listed.decode("utf-8", "replace").splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").removesuffix(" (deleted)")
    return None


def _delegated(group: Path, root: Path) -> bool:
    """Ours to divide: marked so by systemd, owned by our user, or the whole of what a container (or a machine without
    systemd) shows. systemd's rule is that nobody else makes groups in its tree."""
    if not os.access(group, os.W_OK) or not os.access(group / "cgroup.procs", os.W_OK):
        return False
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    if os.geteuid() != 0:
        with contextlib.suppress(OSError):
            return group.stat().st_uid == os.geteuid()
        return False
    top = (group / "cgroup.controllers").exists() and not (group.parent / "cgroup.procs").exists()
    return top and not (root / "run/systemd/system").exists()


def _write(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> bool:
    """Removes a group and the empty groups that the engine may have made in it, the innermost first."""
    try:
        for folder, _, _ in os.walk(path, topdown=False):
            os.rmdir(folder)  # noqa: PTH106 - as os.walk gives it
    except OSError:
        return False
    return True
