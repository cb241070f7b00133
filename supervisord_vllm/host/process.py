"""The engine as a child process: spawned in its own session, known by pid and start time, seen when it ends.

Contract: the child gets no descriptor of ours and always carries its launch's marker; its output goes to one file by
itself, so that a slow or dead daemon never blocks it. The status of the main process is kept uncollected until
`Child.release` (called when its tree has ended): its pid can't be reused while we look for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from supervisord_vllm.engine.command import MARKER
from supervisord_vllm.host import cgroup, exits, procfs
from supervisord_vllm.host.exits import Exit

_PR_SET_CHILD_SUBREAPER = 36

_mains: dict[int, int] = {}
"""Main processes whose status belongs to their `Child`: pid -> start time."""


class SpawnError(Exception):
    """The engine could not be executed; the text is one line that names what and why.

    ``lasting`` says that the next try would fail too: the command is missing or cannot be executed, as against a
    machine that is out of something at the moment.
    """

    def __init__(self, text: str, *, lasting: bool = True) -> None:
        super().__init__(text)
        self.lasting = lasting


_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What a machine runs out of, and gets back."""


def new_marker(instance: str) -> str:
    """A marker for one launch: ``<instance>.<uuid>``; the instance is `supervisord_vllm.places.instance`."""
    return f"{instance}.{uuid.uuid4()}"


@dataclass(eq=False)
class Child:
    """A main process. ``exited`` is resolved as soon as it ends, whoever waits for it."""

    pid: int
    start_ticks: int
    pidfd: int
    marker: str
    log_path: Path
    exited: asyncio.Future[Exit] = field(repr=False)
    group: cgroup.LaunchGroup | None = None
    """Its own cgroup, where we may have one."""

    @property
    def instance(self) -> str:
        """The part of the marker that all launches of this state directory share."""
        return self.marker.partition(".")[0]

    @property
    def exit(self) -> Exit | None:
        """How it ended, ``None`` while it lives."""
        return self.exited.result() if self.exited.done() and not self.exited.cancelled() else None

    def send(self, number: int) -> bool:
        """Signals the main process through its pidfd (no other process can be hit); False if it is gone."""
        if self.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def release(self) -> None:
        """Collects the status and closes the pidfd; for a process that still lives, as soon as it ends."""
        if self.pidfd < 0:
            return
        if self.exited.done():
            exits.look(self.pidfd, collect=True)
            os.close(self.pidfd)
            self.pidfd = -1
            _mains.pop(self.pid, None)
        else:
            self.exited.add_done_callback(lambda _: self.release())


async def wait_exit(child: Child) -> Exit:
    """Waits until the main process has ended; cancelling the wait does no harm to other waiters."""
    return await asyncio.shield(child.exited)


def become_subreaper() -> None:
    """Makes this process the parent of every orphan among its descendants, so that a double fork does not escape.

    Raises:
        OSError: the kernel refused (it never does on Linux 3.4 and later).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def reap_orphans() -> list[int]:
    """Collects adopted orphans that have ended, and says which. A session can't be entered, only made: what is outside
    our own session is the engine's. Main processes and what other parts of the daemon run (in our session) keep their
    status for their owners."""
    session = os.getsid(0)
    reaped: list[int] = []
    for pid in procfs.children():
        found = procfs.stat(pid)
        if found is None or found.alive or found.session == session or _mains.get(pid) == found.start_ticks:
            continue
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                reaped.append(pid)
    return reaped


def watch_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Has adopted orphans collected whenever a child ends (SIGCHLD; the loop must run in the main thread)."""
    loop.add_signal_handler(signal.SIGCHLD, reap_orphans)


def reserve(pid: int, start_ticks: int) -> None:
    """The status of this process is for `adopt`, which follows: nobody else collects it."""
    _mains[pid] = start_ticks


def adopt(pid: int, start_ticks: int, marker: str, log_path: Path) -> Child:
    """The main process that an earlier daemon spawned, as a child that may have ended already. Its status is known only
    where that daemon was this very process, before an execve: any other's child is nobody's to ask.

    `reserve` it before anything collects the statuses of children (`watch_orphans`).
    """
    pidfd = -1
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
    if pidfd >= 0:
        # Compared after the pidfd was opened: if the start time still fits, the descriptor is of this very process.
        found = procfs.stat(pid)
        if found is not None and found.start_ticks == start_ticks:
            _mains[pid] = start_ticks
            return Child(pid, start_ticks, pidfd, marker, log_path, exits.watch(pidfd), cgroup.of_marker(marker))
        os.close(pidfd)
    gone: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    gone.set_result(Exit())
    return Child(pid, start_ticks, -1, marker, log_path, gone, cgroup.of_marker(marker))


def _one_line(argv: Sequence[str], cwd: Path | None, error: OSError) -> str:
    named = error.filename if error.filename is not None else argv[0]
    reason = error.strerror or str(error)
    if cwd is not None and str(named) == str(cwd):
        return f"working directory {cwd}: {reason}"
    return f"cannot execute {argv[0]}: {reason}"


def _start(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, log_path: Path, group: cgroup.LaunchGroup | None
) -> tuple[int, int, int]:
    """pid, start time and pidfd of a new process; runs in a thread, because a log file or a program may lie on a disk
    that hangs."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SpawnError(f"cannot write the launch log {log_path}: {error.strerror}", lasting=False) from error
    try:
        # vLLM logs to stdout and prints tracebacks to stderr: one description with O_APPEND keeps their order.
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=True,
            start_new_session=True,
        )
    except OSError as error:
        raise SpawnError(_one_line(argv, cwd, error), lasting=error.errno not in _PASSING) from error
    except ValueError as error:  # a NUL byte in an argument or variable
        raise SpawnError(f"cannot execute {argv[0]}: {error}") from error
    finally:
        os.close(log)
    if group is not None:
        group.add(popen.pid)
    popen.returncode = 0  # detaches Popen: it would collect the status behind our back
    found = procfs.stat(popen.pid)
    if found is None:
        raise SpawnError(f"cannot see pid {popen.pid} in /proc: is /proc mounted with hidepid?")
    _mains[popen.pid] = found.start_ticks
    try:
        return popen.pid, found.start_ticks, os.pidfd_open(popen.pid)
    except OSError as error:
        os.kill(popen.pid, signal.SIGKILL)
        os.waitpid(popen.pid, 0)
        _mains.pop(popen.pid, None)
        raise SpawnError(f"pidfd_open: {error.strerror} (Linux 5.3 or later is needed)") from error


def _discard(started: asyncio.Future[tuple[int, int, int]], group: cgroup.LaunchGroup | None) -> None:
    """Ends a process whose spawn was cancelled while it was being made."""
    if started.cancelled() or started.exception() is not None:
        return
    pid, _, pidfd = started.result()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pidfd)
    _mains.pop(pid, None)
    if group is not None:
        group.remove()


async def spawn(argv: Sequence[str], env: Mapping[str, str], *, cwd: Path | None, log_path: Path, marker: str) -> Child:
    """Starts the engine. ``env`` is its whole environment (`supervisord_vllm.engine.command.engine_environment`); the
    marker is put in whatever it holds, with ``SPT_NOENV``, without which setproctitle overwrites it.

    Raises:
        SpawnError: no such command, not executable, no such working directory, log not writable.
    """
    if not argv:
        raise SpawnError("cannot execute the engine: the command is empty")
    loop = asyncio.get_running_loop()
    marked = {**env, MARKER: marker, "SPT_NOENV": "1"}
    group = cgroup.make(marker)
    started = loop.run_in_executor(None, _start, argv, marked, cwd, log_path, group)
    try:
        pid, start_ticks, pidfd = await asyncio.shield(started)
    except asyncio.CancelledError:
        started.add_done_callback(lambda done: _discard(done, group))
        raise
    except SpawnError:
        if group is not None:
            group.remove()
        raise
    return Child(pid, start_ticks, pidfd, marker, log_path, exits.watch(pidfd), group)
