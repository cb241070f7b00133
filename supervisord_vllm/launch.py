"""One launch of the engine, from spawn to the last line of its output, as a stream of facts.

It joins the process (host/) with its output and endpoints (engine/). Whatever happens, a launch that was asked for ends
with `SpawnFailed`, or with `Exited`, `Diagnosed` and `TreeEnded` in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from supervisord_vllm.clock import boottime_ns
from supervisord_vllm.core.facts import (
    CanaryDone,
    DeviceMemory,
    Diagnosed,
    Exited,
    Fact,
    FatalSeen,
    HealthSeen,
    LedgerSeen,
    PhaseSeen,
    Spawned,
    SpawnFailed,
    TreeEnded,
)
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.events import Event, FatalEvent, LedgerEvent, PhaseEvent
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.engine.probe import EngineClient, Served
from supervisord_vllm.engine.tail import Tail, tail
from supervisord_vllm.host.exits import Exit
from supervisord_vllm.host.process import Child, SpawnError, spawn, wait_exit
from supervisord_vllm.host.tree import Identity, end_tree, owned_pids, stop

OUTPUT_DEADLINE_S = 10.0
"""For reading what a dead engine left in its log."""
DYING_S = 6.0
"""An engine that fails a canary because it is dying exits within this; then the exit is the better witness."""
BATCH = 500
"""Lines that are judged before other tasks get a turn."""


@dataclass(frozen=True)
class Order:
    """Everything a launch needs to begin. ``argv`` and ``env`` are real; ``shown`` is ``argv`` redacted."""

    number: int
    argv: list[str]
    env: dict[str, str]
    shown: tuple[str, ...]
    marker: str
    log: Path
    cwd: Path | None
    grace_s: float
    served: Served
    health_every_s: float
    metrics_every_s: float


@dataclass(frozen=True)
class Outlets:
    """Where a launch speaks to: the queue of facts and the copy of its output; and where it asks for memory."""

    post: Callable[[Fact], None]
    line: Callable[[bytes], None]
    settled: Callable[[], Awaitable[tuple[DeviceMemory, ...]]]
    last_sample: Callable[[], tuple[DeviceMemory, ...]]


class EngineLaunch:
    """The living side of one launch."""

    def __init__(self, order: Order, client: EngineClient, outlets: Outlets) -> None:
        self.order = order
        self.load: EngineLoad | None = None
        self._client = client
        self._out = outlets
        self._classifier = Classifier()
        self._child: Child | None = None
        self._tail: Tail | None = None
        self._exited = asyncio.Event()
        self._spawned: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._before_end: tuple[DeviceMemory, ...] = ()

    def begin(self) -> None:
        """Start the process; returns at once."""
        self._spawned = self._task(self._begin())

    def canary(self) -> None:
        """Ask for one token; returns at once."""
        self._probe(self._canary())

    def stop(self, phase: Literal["starting", "serving"]) -> None:
        """End the engine, politely first; returns at once. Only lines before this can be a cause."""
        self._task(self._end(phase))

    def end_tree(self) -> None:
        """The main process is gone: end what it left behind; returns at once."""
        self._task(self._end(None))

    def own_pids(self) -> frozenset[int]:
        """The processes that are proven to be this launch's; reads /proc, so call it in a thread."""
        child = self._child
        if child is None:
            return frozenset()
        return owned_pids(child.instance, roots=(Identity(child.pid, child.start_ticks),))

    # --- tasks ---

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"launch-{self.order.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _probe(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._task(work)
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _begin(self) -> None:
        order = self.order
        try:
            self._child = await spawn(order.argv, order.env, cwd=order.cwd, log_path=order.log, marker=order.marker)
        except SpawnError as error:
            self._out.post(SpawnFailed(at_ns=boottime_ns(), launch=order.number, error=str(error)))
            return
        self._out.post(
            Spawned(
                at_ns=boottime_ns(),
                launch=order.number,
                pid=self._child.pid,
                start_ticks=self._child.start_ticks,
                argv=order.shown,
                log=str(order.log),
            )
        )
        self._reader = self._task(self._read())
        self._task(self._watch_exit(self._child))
        self._probe(self._poll_health())
        self._probe(self._poll_metrics())

    async def _watch_exit(self, child: Child) -> None:
        ended: Exit = await wait_exit(child)
        self._before_end = self._out.last_sample()
        self._exited.set()
        self._out.post(Exited(at_ns=boottime_ns(), launch=self.order.number, code=ended.code, signal=ended.signal))

    async def _read(self) -> None:
        """The output: copied, and turned into facts."""
        self._tail = tail(self.order.log, stopped=self._exited)
        async for lines in self._tail:
            for count, line in enumerate(lines, 1):
                self._out.line(line)
                for event in self._classifier.feed(line):
                    self._out.post(self._fact(event))
                if count % BATCH == 0:
                    await asyncio.sleep(0)

    def _fact(self, event: Event) -> Fact:
        now, launch = boottime_ns(), self.order.number
        if isinstance(event, PhaseEvent):
            return PhaseSeen(at_ns=now, launch=launch, phase=event.phase)
        if isinstance(event, LedgerEvent):
            return LedgerSeen(at_ns=now, launch=launch, numbers=event.numbers)
        assert isinstance(event, FatalEvent)
        return FatalSeen(at_ns=now, launch=launch, text=event.text)

    async def _poll_health(self) -> None:
        seen: int | None = None
        while not self._exited.is_set():
            status = await self._client.health()
            if status != seen:
                seen = status
                self._out.post(HealthSeen(at_ns=boottime_ns(), launch=self.order.number, status=status))
            await self._pause(self.order.health_every_s)

    async def _poll_metrics(self) -> None:
        while not self._exited.is_set():
            load = await self._client.metrics()
            if load is not None:
                self.load = load
            await self._pause(self.order.metrics_every_s)

    async def _pause(self, seconds: float) -> bool:
        """Waits, but not beyond the exit; whether the engine exited."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
        return self._exited.is_set()

    async def _canary(self) -> None:
        result = await self._client.canary(self.order.served)
        if not result.ok:
            await self._pause(DYING_S)
        self._out.post(
            CanaryDone(
                at_ns=boottime_ns(),
                launch=self.order.number,
                ok=result.ok,
                detail=result.detail,
                seconds=result.seconds,
            )
        )

    async def _end(self, phase: Literal["starting", "serving"] | None) -> None:
        """The end of the launch; with a phase it is ours, without one the engine ended by itself."""
        if self._spawned is not None:
            await self._spawned
        child, launch = self._child, self.order.number
        if child is None:
            self._out.post(TreeEnded(at_ns=boottime_ns(), launch=launch))
            return
        for probe in tuple(self._probes):
            probe.cancel()
        if phase is not None:
            await self._overtaken()
            self._classifier.cut()
            survivors = await stop(child, phase=phase, grace_s=self.order.grace_s)
        else:
            survivors = await end_tree(child)
        if not survivors:
            await self._exited.wait()
        if self._reader is not None:
            await asyncio.wait((self._reader,), timeout=OUTPUT_DEADLINE_S)
        ended = child.exit
        diagnosis = self._classifier.verdict(
            exit_code=ended.code if ended else None,
            exit_signal=ended.signal if ended else None,
            expected_stop=phase is not None,
        )
        after = await self._out.settled()
        before = self._before_end or self._out.last_sample()
        self._out.post(Diagnosed(at_ns=boottime_ns(), launch=launch, diagnosis=diagnosis, devices=before, after=after))
        self._out.post(TreeEnded(at_ns=boottime_ns(), launch=launch, survivors=survivors))

    async def _overtaken(self) -> None:
        """Lets the reader come level with what is already in the file, so that the cut falls where our signal does."""
        loop = asyncio.get_running_loop()
        size, deadline = self.order.log.stat().st_size, loop.time() + 1.0
        while self._tail is not None and self._tail.offset < size and loop.time() < deadline:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
