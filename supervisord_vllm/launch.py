"""One launch of the engine, from spawn to the last line of its output, as a stream of facts.

It joins the process (host/) with its output and endpoints (engine/). Whatever happens, a launch that was asked for ends
with `SpawnFailed`, or with `Exited`, `Diagnosed` and `TreeEnded` in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from supervisord_vllm.clock import SECOND_NS, boottime_ns
from supervisord_vllm.core import actions as act
from supervisord_vllm.core.facts import (
    BurstDone,
    CanaryDone,
    DeviceMemory,
    Diagnosed,
    Exited,
    Fact,
    FatalSeen,
    HealthSeen,
    LedgerSeen,
    LoadSeen,
    OomKilled,
    PhaseSeen,
    Signalled,
    Spawned,
    SpawnFailed,
    TreeEnded,
)
from supervisord_vllm.engine.circumstance import Outside
from supervisord_vllm.engine.classifier import Classifier
from supervisord_vllm.engine.events import Event, FatalEvent, LedgerEvent, PhaseEvent
from supervisord_vllm.engine.metrics import EngineLoad, NoPage
from supervisord_vllm.engine.probe import NO_ANSWER, EngineClient, Served
from supervisord_vllm.engine.proof import Burst, BurstOrder, BurstResult
from supervisord_vllm.engine.tail import Tail, tail
from supervisord_vllm.host.exits import Exit
from supervisord_vllm.host.kernel import oom_kills
from supervisord_vllm.host.leftovers import clear_segments, segments
from supervisord_vllm.host.process import Child, SpawnError, spawn, wait_exit
from supervisord_vllm.host.tree import DEFAULT_PATIENCE, Identity, Patience, Phase, end_tree, owned_pids, stop
from supervisord_vllm.store.launch_logs import prepare_launch_log, shorten_past_logs
from supervisord_vllm.store.log_space import HEAD_BYTES, LogSpace
from supervisord_vllm.vigil import Terms, Vigil

OUTPUT_DEADLINE_S = 10.0
"""For reading what a dead engine left in its log."""
DYING_S = 6.0
"""An engine that fails a canary because it is dying exits within this; then the exit is the better witness."""
BATCH = 500
"""Lines that are judged before other tasks get a turn."""
WATCHED = 200
"""Lines of one batch that can show a start's progress: more at once are a flood."""
KERNEL_LINES = 64
"""Lines of the kernel's log that are kept for the verdict."""
HEADLESS_SETTLE_S = 5.0
"""An engine without an API of its own counts as up this long after it has its KV cache."""
REPLAYED_BYTES = 4 << 20
"""Of a long log that an earlier daemon has read, this much of the end is judged again beside the head: a verdict needs
no more, and weeks of access lines would take minutes."""
SPACE_EVERY_S = 5.0
"""Between two looks at the disk that the log is on."""
IDLE_PAGES = 2
"""Pages of /metrics in a row without a request before an engine counts as idle."""


UNSEEN = -1
"""No status of /health: what was seen last, by another daemon, may hold no more."""


@dataclass(frozen=True)
class Order:
    """Everything a launch needs to begin. ``argv`` and ``env`` are real; ``shown`` is ``argv`` redacted."""

    number: int
    argv: list[str]
    env: dict[str, str]
    shown: tuple[str, ...]
    marker: str
    log: Path
    log_bytes: int
    cwd: Path | None
    grace_s: float
    served: Served
    health_every_s: float
    metrics_every_s: float
    terms: Terms
    patience: Patience = DEFAULT_PATIENCE


@dataclass(frozen=True)
class Outlets:
    """Where a launch speaks to: the queue of facts and the copy of its output; and where it asks for memory."""

    post: Callable[[Fact], None]
    line: Callable[[bytes, int], None]
    settled: Callable[[], Awaitable[tuple[DeviceMemory, ...]]]
    last_sample: Callable[[], tuple[DeviceMemory, ...]]
    told: Callable[[str], object]
    buses: Callable[[], frozenset[str]]
    page: Callable[[int, EngineLoad | NoPage], None]
    """Takes each page of /metrics, or that there was none, with the launch's number."""
    moved: Callable[[], None]
    """The burst of a proof has gone on."""


class EngineLaunch:
    """The living side of one launch."""

    def __init__(self, order: Order, client: EngineClient, outlets: Outlets) -> None:
        self.order = order
        self.load: EngineLoad | None = None
        self.bursting: Burst | None = None
        self._client = client
        self._out = outlets
        self._classifier = Classifier()
        self._child: Child | None = None
        self._tail: Tail | None = None
        self._exited = asyncio.Event()
        self._over = asyncio.Event()
        self._spawned: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._before_end: tuple[DeviceMemory, ...] = ()
        self._forced = asyncio.Event()
        self._kills: int | None = None
        self._killed = 0
        self._kernel: list[str] = []
        self._known_pids: frozenset[int] = frozenset()
        self._status: int | None = None
        self._copied = 0
        self._cut: int | None = None
        self._waited_s = 0.0
        self._signalled = False
        self._empty_pages = 0
        self._idle: bool | None = None
        self._segments: frozenset[str] = frozenset()
        self._space = LogSpace(
            order.log,
            order.log_bytes,
            outlets.told,
            lambda: shorten_past_logs(order.log.parent, order.number),
        )
        self._space_wanted = asyncio.Event()
        self.vigil = Vigil(order.terms, client, outlets.post, self.own_pids)

    def begin(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start the process; returns at once. ``prepare`` comes first, in a thread: its disk may hang."""
        self._spawned = self._task(self._begin(prepare))

    def adopt(self, child: Child, *, healthy: bool, copied: int, cut: int | None) -> None:
        """Go on with a process that an earlier daemon spawned; returns at once. Its log is read again from the start,
        for the verdict; the copy goes on from the position ``copied``, and only lines before ``cut`` can be a cause.
        Of one that was ``healthy`` the first look at /health is told whatever it says."""
        self._status = UNSEEN if healthy else None
        self._child = child
        self._copied, self._cut = copied, cut
        self._kills = oom_kills()
        self._watch(child)

    async def settled(self) -> None:
        """Until no spawn is half done."""
        if self._spawned is not None:
            await asyncio.wait((self._spawned,))

    def canary(self) -> None:
        """Ask for one token; returns at once."""
        self._probe(self._canary())

    def burst(self, action: act.Burst) -> None:
        """Send the burst of the proof; returns at once."""
        self._probe(self._burst(action))

    def force(self) -> None:
        """A stop in progress waits no longer: KILL."""
        self._forced.set()

    def stop(self, phase: Phase, waited_s: float = 0.0, *, signalled: bool = False) -> None:
        """End the engine, politely first; returns at once. Only lines before this can be a cause. A daemon before us
        may have ``signalled`` it and waited for so long."""
        self._waited_s, self._signalled = waited_s, signalled
        self._task(self._end(phase))

    def end_tree(self) -> None:
        """The main process is gone: end what it left behind; returns at once."""
        self._task(self._end(None))

    def kernel_said(self, text: str) -> None:
        """A line of the kernel's log while this launch is the present one."""
        if len(self._kernel) < KERNEL_LINES:
            self._kernel.append(text)

    def own_pids(self) -> frozenset[int]:
        """The processes that are proven to be this launch's; reads /proc, so call it in a thread."""
        child = self._child
        if child is None:
            return frozenset()
        living = owned_pids(child.instance, roots=(Identity(child.pid, child.start_ticks),))
        self._known_pids |= living
        return living

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

    async def _begin(self, prepare: Callable[[], None]) -> None:
        order = self.order
        self._kills = oom_kills()
        await asyncio.to_thread(prepare)
        await asyncio.to_thread(self._make_room)
        try:
            self._child = await spawn(order.argv, order.env, cwd=order.cwd, log_path=order.log, marker=order.marker)
        except SpawnError as error:
            failed = SpawnFailed(at_ns=boottime_ns(), launch=order.number, error=str(error), lasting=error.lasting)
            self._out.post(failed)
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
        self._watch(self._child)

    def _make_room(self) -> None:
        """Space for the output, before there is any: an engine that cannot print does not start."""
        prepare_launch_log(self.order.log.parent, self.order.number)
        self._space.keep(0)

    def _watch(self, child: Child) -> None:
        self._reader = self._task(self._read())
        self._task(self._keep_space())
        self._task(self._watch_exit(child))
        self._probe(self._poll_health())
        self._probe(self._poll_metrics())
        self._probe(self.vigil.watch())

    async def _watch_exit(self, child: Child) -> None:
        ended: Exit = await wait_exit(child)
        self._before_end = self._out.last_sample()
        self._exited.set()
        self._space_wanted.set()
        self._count_kills()
        self._out.post(Exited(at_ns=boottime_ns(), launch=self.order.number, code=ended.code, signal=ended.signal))

    def _count_kills(self) -> None:
        """What the kernel killed for memory since the launch began, if that is told."""
        now = oom_kills()
        if now is not None and self._kills is not None and now - self._kills > self._killed:
            self._killed = now - self._kills
            self._out.post(OomKilled(at_ns=boottime_ns(), launch=self.order.number, count=self._killed))

    async def _read(self) -> None:
        """The output: copied, and turned into facts, until nothing is left that could print: a resource tracker speaks
        last, after the main process is gone."""
        known = (HEAD_BYTES, self._copied - REPLAYED_BYTES)
        self._tail = tail(self.order.log, stopped=self._over, omit=known)
        async for lines in self._tail:
            for count, (line, end) in enumerate(zip(lines, lines.ends, strict=True), 1):
                if self._cut is not None and end > self._cut:
                    self._classifier.cut()
                    self._cut = None
                if end > self._copied:
                    self._out.line(line, end)
                if count <= WATCHED:
                    self.vigil.line(line)
                for event in self._classifier.feed(line):
                    # Read before: what it says now of a dying engine was answered then.
                    if end > self._copied or not isinstance(event, FatalEvent):
                        self._out.post(self._fact(event))
                if count % BATCH == 0:
                    await asyncio.sleep(0)
            if self._space.due(self._tail.offset):
                self._space_wanted.set()

    async def _keep_space(self) -> None:
        """The log takes no more of the disk than it may, and can grow on a full one."""
        while not self._exited.is_set():
            await asyncio.to_thread(self._space.keep, self._tail.offset if self._tail is not None else 0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._space_wanted.wait(), SPACE_EVERY_S)
            self._space_wanted.clear()

    def _fact(self, event: Event) -> Fact:
        now, launch = boottime_ns(), self.order.number
        if isinstance(event, PhaseEvent):
            return PhaseSeen(at_ns=now, launch=launch, phase=event.phase)
        if isinstance(event, LedgerEvent):
            return LedgerSeen(at_ns=now, launch=launch, numbers=event.numbers)
        assert isinstance(event, FatalEvent)
        return FatalSeen(at_ns=now, launch=launch, text=event.text)

    async def _poll_health(self) -> None:
        seen = self._status
        while not self._exited.is_set():
            status = await (self._settled_headless() if self.order.terms.headless else self._client.health())
            if status == NO_ANSWER:  # busy is not dead: whether anything moves is for the vigil to say
                status = seen
            if status != seen:
                seen = status
                if status == 200:
                    await self._came_up()
                self._out.post(HealthSeen(at_ns=boottime_ns(), launch=self.order.number, status=status))
            await self._pause(self.order.health_every_s)

    async def _came_up(self) -> None:
        """The first healthy answer: what can only be seen of a whole engine is noted."""
        length = self._classifier.ledger.get("max_model_len")
        self.vigil.healthy(length if isinstance(length, int) else None)
        self._segments |= await asyncio.to_thread(lambda: segments(self.own_pids()))

    async def _settled_headless(self) -> int | None:
        """The health of an engine without an API: 200 once it has its KV cache and some seconds more."""
        if "kv_tokens" not in self._classifier.ledger:
            return None
        await self._pause(HEADLESS_SETTLE_S)
        return 200

    async def _poll_metrics(self) -> None:
        while not self._exited.is_set():
            page = None if self.order.terms.headless else await self._client.page()
            if isinstance(page, EngineLoad):
                self.load = page
                self.vigil.loaded(page)
                self._tell_load(page)
            if page is not None:
                self._out.page(self.order.number, page)
            self._count_kills()
            await self._pause(self.order.metrics_every_s)

    def _tell_load(self, load: EngineLoad) -> None:
        """Idle (two pages in a row without a request) or busy: only a change is a fact."""
        if load.running is None or load.waiting is None:
            return
        running, waiting = int(load.running), int(load.waiting)
        idle = running + waiting == 0
        self._empty_pages = self._empty_pages + 1 if idle else 0
        if idle and self._empty_pages < IDLE_PAGES:
            return
        if idle is not self._idle:
            self._idle = idle
            self._out.post(LoadSeen(at_ns=boottime_ns(), launch=self.order.number, running=running, waiting=waiting))

    async def _pause(self, seconds: float) -> bool:
        """Waits, but not beyond the exit; whether the engine exited."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
        return self._exited.is_set()

    async def _canary(self) -> None:
        if self.order.terms.headless:
            answered = CanaryDone(at_ns=boottime_ns(), launch=self.order.number, ok=True, detail="headless: no API")
            self._out.post(answered)
            return
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
                status=result.status,
                first_token_s=result.first_token_s,
            )
        )

    async def _burst(self, action: act.Burst) -> None:
        wanted = (action.requests, action.prompt_tokens, action.output_tokens, action.max_ns / SECOND_NS)
        try:
            if self.order.terms.headless:
                result = BurstResult(True, detail="headless: no API")
            else:
                self.bursting = Burst(self._client, BurstOrder(*wanted, self.order.served), self._out.moved)
                result = await self.bursting.run()
        except Exception as error:  # noqa: BLE001 - our own mistake must not end an engine that works
            self._out.told(f"the burst of launch {self.order.number} could not be carried out: {error!r}")
            result = BurstResult(True, detail=f"could not be carried out: {error!r}"[:200])
        self._out.post(
            BurstDone(at_ns=boottime_ns(), launch=self.order.number, requests=action.requests, **asdict(result))
        )

    async def _end(self, phase: Phase | None) -> None:
        """The end of the launch; with a phase it is ours, without one the engine ended by itself. Whatever breaks on
        the way, the tree is ended and said to be."""
        try:
            await self._end_in_order(phase)
        except Exception as error:  # noqa: BLE001 - an engine that cannot be ended is worse than any error
            launch, child = self.order.number, self._child
            self._out.told(f"the end of launch {launch} did not go in order ({error!r}): its tree is killed")
            survivors = await end_tree(child, patience=self.order.patience) if child is not None else ()
            self._over.set()
            verdict = self._classifier.verdict(expected_stop=phase is not None)
            self._out.post(Diagnosed(at_ns=boottime_ns(), launch=launch, diagnosis=verdict))
            self._out.post(TreeEnded(at_ns=boottime_ns(), launch=launch, survivors=survivors))

    async def _end_in_order(self, phase: Phase | None) -> None:
        if self._spawned is not None:
            await self._spawned
        child, launch = self._child, self.order.number
        if child is None:
            self._out.post(TreeEnded(at_ns=boottime_ns(), launch=launch))
            return
        for probe in tuple(self._probes):
            probe.cancel()
        if phase is not None:
            self._segments |= await asyncio.to_thread(lambda: segments(self.own_pids()))
            if not self._signalled:
                await self._overtaken()
                self._classifier.cut()
                position = self._tail.offset if self._tail is not None else 0
                self._out.post(Signalled(at_ns=boottime_ns(), launch=launch, position=position))
            survivors = await stop(
                child,
                phase=phase,
                grace_s=max(0.0, self.order.grace_s - self._waited_s),
                patience=self.order.patience,
                force=self._forced,
                signalled=self._signalled,
            )
        else:
            survivors = await end_tree(child, patience=self.order.patience)
        if not survivors:
            await self._exited.wait()
        self._over.set()
        if self._reader is not None:
            await asyncio.wait((self._reader,), timeout=OUTPUT_DEADLINE_S)
        ended = child.exit
        diagnosis = self._classifier.verdict(
            exit_code=ended.code if ended else None,
            exit_signal=ended.signal if ended else None,
            expected_stop=phase is not None,
            outside=Outside(
                kernel=tuple(self._kernel),
                buses=tuple(sorted(self._out.buses())),
                pids=self._known_pids,
                oom_kills=self._killed,
            ),
        )
        after = await self._out.settled()
        before = self._before_end or self._out.last_sample()
        self._out.post(Diagnosed(at_ns=boottime_ns(), launch=launch, diagnosis=diagnosis, devices=before, after=after))
        await self._clear_segments()
        self._out.post(TreeEnded(at_ns=boottime_ns(), launch=launch, survivors=survivors))

    async def _clear_segments(self) -> None:
        """Shared memory that this launch's processes had mapped and nobody has now: their resource tracker was killed
        with them."""
        if removed := await asyncio.to_thread(clear_segments, self._segments):
            self._out.told(f"shared memory of dead processes was removed: {', '.join(removed)}")

    async def _overtaken(self) -> None:
        """Lets the reader come level with what is already in the file, so that the cut falls where our signal does."""
        loop = asyncio.get_running_loop()
        try:
            size, deadline = self.order.log.stat().st_size, loop.time() + 1.0
        except OSError:  # somebody removed it; what was read is all there will be
            return
        while self._tail is not None and self._tail.offset < size and loop.time() < deadline:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
