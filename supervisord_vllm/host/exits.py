"""How a process ended, and seeing it at once.

Contract: `watch` resolves within one turn of the event loop after the kernel says that the last thread is gone (a
pidfd becomes readable). The status is looked at but left to be collected (WNOWAIT): as long as the caller does not
collect it, the pid stays taken and a session of that number can only be ours.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exit:
    """Exactly one of ``code`` and ``signal`` is set; both are ``None`` when the status is not known."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return "exit status unknown" if self.code is None else f"exit {self.code}"


def look(pidfd: int, *, collect: bool) -> Exit | None:
    """The status of a child that ended, ``None`` while it lives. ``collect`` also takes it away (reaps the zombie)."""
    options = os.WEXITED | os.WNOHANG | (0 if collect else os.WNOWAIT)
    try:
        found = os.waitid(os.P_PIDFD, pidfd, options)
    except ChildProcessError:  # not our child, or somebody else collected the status
        return Exit()
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return Exit(code=found.si_status)
    return Exit(signal=found.si_status)


def watch(pidfd: int) -> asyncio.Future[Exit]:
    """A future of the running loop that holds the exit of the child behind ``pidfd``."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Exit] = loop.create_future()

    def readable() -> None:
        found = look(pidfd, collect=False)
        if found is None:
            return
        loop.remove_reader(pidfd)
        if not future.done():
            future.set_result(found)

    loop.add_reader(pidfd, readable)
    return future
