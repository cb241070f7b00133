"""A machine with a real systemd: PID 1 of its own namespaces, on a throw-away overlay of this machine's root.

Needs root, systemd 244 or later, dbus and util-linux; nothing is installed. It boots in one to two seconds, has the
host's network, sees the project and its Python (read-only) and writes to memory only. All cgroups are v2; the limits of
controllers that the host keeps in v1 trees do not work inside. Nothing of it outlives the test process, not even its
SIGKILL: processes die with their parent, mounts are in private namespaces, and the one cgroup on the host is removed
at the end or, after a SIGKILL, by the next machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("machine.sh")
TREES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
GROUP = "vllm-supervise-machine-"
BOOT_S = 60.0
POWER_OFF_S = 30.0
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "SYSTEMD_PAGER": "",
    "SYSTEMD_COLORS": "0",
}

Json = dict[str, Any]


def missing() -> str | None:
    """Why no machine can be started here, or ``None``."""
    if os.geteuid() != 0:
        return "a systemd of our own needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "no /lib/systemd/systemd: install systemd and dbus"
    if _tree() is None:
        return "no cgroup v2 tree at /sys/fs/cgroup or /sys/fs/cgroup/unified"
    for program in ("unshare", "nsenter", "setpriv", "dbus-daemon"):
        if shutil.which(program) is None:
            return f"no {program} in PATH"
    return None


def _tree() -> Path | None:
    return next((tree for tree in TREES if (tree / "cgroup.controllers").exists()), None)


def shown() -> list[Path]:
    """What must be seen inside under its own path: the project, the environment that runs the tests, its Python."""
    wanted = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
    return [path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)]


@dataclass
class Machine:
    """One machine that runs."""

    folder: Path
    _outer: subprocess.Popen[bytes]
    group: Path

    @property
    def pid(self) -> int:
        """Its systemd, as the host numbers it."""
        return int((self.folder / "pid").read_text())

    @property
    def root(self) -> Path:
        """Its file system, seen from the host; follow no absolute link in it."""
        return Path(f"/proc/{self.pid}/root")

    def path(self, inside: str) -> Path:
        """A file of the machine, for reading and writing from the host."""
        return self.root / inside.lstrip("/")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Put a file into the machine."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def run(self, *argv: str, status: int | None = 0, given: str | None = None, seconds: float = 120.0) -> str:
        """A command inside, as root and outside of any unit; what it printed, errors after output. ``status`` is what
        it must exit with."""
        environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root"]
        done = subprocess.run(
            [*enter, "--wdns=/", "env", "--ignore-environment", *environment, *argv],
            input=given if given is not None else "",
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            start_new_session=True,  # a command that signals its process group must not hit the tests
        )
        told = done.stdout + done.stderr
        assert status is None or done.returncode == status, f"{argv} ended with {done.returncode}: {told}"
        return told

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        told = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names))
        return dict(line.split("=", 1) for line in told.splitlines() if "=" in line)

    def journal(self, unit: str) -> list[Json]:
        """Everything that a unit, or systemd about it, has said since the boot."""
        self.run("journalctl", "--sync")
        told = self.run("journalctl", "--no-pager", "--all", "--output=json", "--unit", unit)
        return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

    def _state(self) -> str:
        try:
            return self.run("systemctl", "is-system-running", status=None, seconds=20).split("\n", 1)[0]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return "not there"

    def wait_booted(self, before: int | None = None) -> None:
        """Wait until it is up; with ``before`` another systemd than this one (a reboot)."""

        def up() -> bool:
            assert self._outer.poll() is None, f"the machine ended: {self.console()}"
            with contextlib.suppress(OSError, ValueError):
                return self.pid != before and self._state() in ("running", "degraded")
            return False

        until(up, BOOT_S, lambda: f"the machine is {self._state()}: {self.console()}")

    def reboot(self) -> None:
        """``systemctl reboot``; returns when it is up again. Files stay, the journal and /run do not."""
        before = self.pid
        self.run("systemctl", "reboot", status=None)  # the connection may break before the answer comes
        self.wait_booted(before)

    def console(self) -> str:
        """What was said before a journal could hear it."""
        return (self.folder / "console").read_text(errors="replace")[-4000:]

    def power_off(self) -> None:
        """An orderly end, after `POWER_OFF_S` a hard one; nothing of the machine is left on the host."""
        try:
            with contextlib.suppress(OSError, ValueError):
                os.kill(self.pid, signal.SIGRTMIN + 4)  # systemd(1): poweroff.target
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._outer.wait(POWER_OFF_S)
        finally:
            self._outer.kill()
            self._outer.wait()
            until(lambda: _remove(self.group), 10, f"{self.group} cannot be removed", every=0.05)


def _remove(group: Path) -> bool:
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106 - as os.walk gives it
    return not group.exists()


def sweep() -> None:
    """Remove the groups and folders of machines whose test process was killed."""
    for group in _parent().glob(f"{GROUP}*"):
        test = group.name.removeprefix(GROUP).partition("-")[0]
        if not Path("/proc", test).exists() and _remove(group):
            shutil.rmtree(_folder(group), ignore_errors=True)


def _parent() -> Path:
    """The test process's own cgroup."""
    tree = _tree()
    assert tree is not None
    (inside,) = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    return tree / inside.lstrip("/")


def _folder(group: Path) -> Path:
    return Path(tempfile.gettempdir(), f"vs-machine-{group.name.removeprefix(GROUP)}")


@contextmanager
def machine() -> Iterator[Machine]:
    """A machine, booted; it is gone at the end."""
    sweep()
    group = _parent() / f"{GROUP}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    folder = _folder(group)
    folder.mkdir(mode=0o700)
    try:
        with (folder / "console").open("wb") as console:
            # A shell moves itself into the group first; unshare makes that the root of all groups inside.
            enter = ["sh", "-ec", 'echo 0 >"$1/cgroup.procs" && shift && exec "$@"', "machine", str(group)]
            hold = ["unshare", "--mount", "--propagation", "private", "bash", str(SCRIPT), "hold", str(folder)]
            outer = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *enter, *hold, *map(str, shown())],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        made = Machine(folder, outer, group)
        try:
            made.wait_booted()
            _let_others_in(made)
            yield made
        finally:
            made.power_off()
    finally:
        _remove(group)
        shutil.rmtree(folder, ignore_errors=True)


def _let_others_in(made: Machine) -> None:
    """The way to the project and its Python may lead through a closed home folder; inside, everybody may walk it."""
    for path in shown():
        for parent in path.parents:
            inside = made.path(str(parent))
            mode = inside.stat().st_mode & 0o7777
            if not mode & 0o001:
                inside.chmod(mode | 0o011)
