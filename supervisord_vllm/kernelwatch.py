"""The kernel's log while the daemon runs: GPU errors and the OOM killer become facts, and witnesses of an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from supervisord_vllm.clock import boottime_ns
from supervisord_vllm.core.facts import Fact, KernelSeen
from supervisord_vllm.host.kernel import KernelLine, KernelLog


class KernelWatch:
    """Reads from `open` to `close`. ``launch`` is the number of the present launch (0: none), ``own_pids`` its
    processes as last seen, ``buses`` the GPUs that it uses, ``told`` gets the lines that may be about it."""

    def __init__(
        self,
        post: Callable[[Fact], None],
        launch: Callable[[], int],
        own_pids: Callable[[], frozenset[int]],
        buses: Callable[[], frozenset[str]],
        told: Callable[[str], None],
    ) -> None:
        self._post = post
        self._launch = launch
        self._own_pids = own_pids
        self._buses = buses
        self._told = told
        self._kernel: KernelLog | None = None
        self._log = structlog.get_logger()

    def open(self) -> None:
        """Read the kernel's log from now on; where that is not permitted, say so once."""
        opened = KernelLog.open()
        if isinstance(opened, str):
            self._log.info("the kernel's log cannot be read, so Xid and OOM-killer lines are not seen", reason=opened)
            return
        self._kernel = opened
        asyncio.get_running_loop().add_reader(opened.fileno(), self._said, opened)

    def close(self) -> None:
        """Read no more."""
        if self._kernel is not None:
            asyncio.get_running_loop().remove_reader(self._kernel.fileno())
            self._kernel.close()
            self._kernel = None

    def _said(self, log: KernelLog) -> None:
        for line in log.read():
            ours = self._is_ours(line)
            if ours is not False:
                self._log.warning("the kernel says", text=line.text, ours=ours)
                self._told(line.text)
            self._post(
                KernelSeen(
                    at_ns=boottime_ns(),
                    launch=self._launch(),
                    kind=line.kind,
                    text=line.text,
                    bus_id=line.bus_id,
                    number=line.number,
                    pid=line.pid,
                    ours=ours,
                )
            )

    def _is_ours(self, line: KernelLine) -> bool | None:
        """Whether a line is about our launch: its processes as they were last seen, or its GPUs."""
        if line.kind == "oom_killer":
            return line.pid in self._own_pids()
        buses = self._buses()
        # A switch has a bus id of its own, and serves every GPU of the machine.
        return None if not buses or line.kind == "sxid" else line.bus_id in buses
