"""The daemon: one task owns the state; everything else puts facts into its queue or reads a snapshot.

A fact that changed the state or caused an action is recorded, so that replay of the record gives the same decisions. A
decision is on the disk before it is acted on, or after 2 s it is acted on and marked unrecorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog

from supervisord_vllm import __version__
from supervisord_vllm.api import ControlSocket, Exporter, HttpServer, RefusedError, Verb
from supervisord_vllm.chronicle import Chronicle
from supervisord_vllm.clock import SECOND_NS, Now, boot_id, boottime_ns
from supervisord_vllm.config import ConfigError, Settings
from supervisord_vllm.core import actions as act
from supervisord_vllm.core.diagnosis import Number
from supervisord_vllm.core.facts import (
    Cleaned,
    Commanded,
    DaemonStarted,
    Fact,
    HealthSeen,
    LedgerSeen,
    LeftoversReaped,
    ProcessRef,
    Tick,
)
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.operating import why_no_step
from supervisord_vllm.core.progress import Gaps
from supervisord_vllm.core.state import State, StateName, wake_at_ns
from supervisord_vllm.engine.probe import EngineClient
from supervisord_vllm.engine.signature import outside_verified
from supervisord_vllm.host.gate import Gate
from supervisord_vllm.host.leftovers import caches, clear_locks
from supervisord_vllm.host.memory import MemorySource, Sampler, source_of
from supervisord_vllm.host.port import port_owner, socket_owner
from supervisord_vllm.host.process import become_subreaper, new_marker, watch_orphans
from supervisord_vllm.host.systemd import Notifier, watchdog_interval
from supervisord_vllm.host.tree import reap_leftovers
from supervisord_vllm.kernelwatch import KernelWatch
from supervisord_vllm.launch import EngineLaunch, Outlets
from supervisord_vllm.log import EngineOutput
from supervisord_vllm.memorywatch import MemoryWatch
from supervisord_vllm.orders import order_of
from supervisord_vllm.places import INSTANCE_META, SOCKET, STORE, instance
from supervisord_vllm.redaction import Redactor
from supervisord_vllm.status import Snapshot, snapshot_of
from supervisord_vllm.store import Store
from supervisord_vllm.store.launch_logs import prune_launch_logs

PULSE_S = 5.0
"""The loop turns at least this often, so that a watchdog hears of it."""


@dataclass(frozen=True)
class _Asked:
    """A fact that somebody waits for: the future gets the states before and after it."""

    fact: Fact
    answer: asyncio.Future[tuple[State, State]] | None = None


class Daemon:
    """One instance. Made inside a running loop; `main` returns the exit status."""

    def __init__(self, settings: Settings, store: Store, output: EngineOutput | None, redactor: Redactor) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.state = State.initial()
        self._store = store
        self._output = output
        self._redactor = redactor
        self._log = structlog.get_logger()
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue()
        self._notifier = Notifier(os.environ)
        self._instance = instance(settings.state_dir)
        engine = settings.engine
        self._client = EngineClient(engine.url, engine.api_key, engine.ca_file, engine.verify_tls)
        self._sampler = Sampler(self._open_source, timeout_s=settings.memory.timeout_s)
        self._gate = Gate(self._sampler, self._port_owner, settings.runtime_dir, self.post, self._memory_short)
        self._exporter = Exporter(self, __version__)
        self._launch: EngineLaunch | None = None
        self._chronicle = Chronicle(store, self._exporter, settings.policy)
        self._exit: int | None = None
        self._memory = MemoryWatch(self._sampler, self.post, lambda: self.state, lambda: self._launch)
        self._kernel = KernelWatch(
            self.post,
            lambda: self.state.launch.number if self.state.launch is not None else 0,
            lambda: self._memory.own_pids,
            lambda: self._sampler.bus_ids,
            self._kernel_said,
        )
        self._notified_ready = False
        self._version: Number | None = None
        self._watchdog_at = 0.0
        self._gaps = Gaps()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what others may do ---

    def post(self, fact: Fact) -> None:
        """Put a fact into the queue; never waits. Call it on the loop."""
        self._queue.put_nowait(_Asked(fact))

    def snapshot(self) -> Snapshot:
        """Describe this moment (see `api.Control`)."""
        last = self.state.last_decision
        return replace(
            snapshot_of(self.policy, self.state, Now.read()),
            memory=self._memory.last,
            memory_age_s=self._sampler.age_s,
            memory_error=self._memory.error,
            load=self._launch.load if self._launch is not None else None,
            outcome=None if last is None else self._chronicle.outcome(last.number),
            earlier=self._chronicle.earlier,
            pid=os.getpid(),
            version=__version__,
            counters={
                "facts": self.state.dropped,
                "store_entries": self._store.lost,
                "engine_lines": self._output.dropped if self._output is not None else 0,
            },
        )

    async def command(
        self, verb: Verb, reason: str, by: str, lever: str = "", direction: Literal["up", "down"] = "down"
    ) -> str:
        """An operator's word (see `api.Control`)."""
        answer: asyncio.Future[tuple[State, State]] = asyncio.get_running_loop().create_future()
        fact = Commanded(at_ns=boottime_ns(), verb=verb, reason=reason, by=by, lever=lever, direction=direction)
        self._queue.put_nowait(_Asked(fact, answer))
        before, after = await answer
        self._log.info("command", verb=verb, by=by, reason=reason or None, state=after.name.value)
        if verb == "hold":
            return "held: a failure restarts the same configuration, within the budget, until `vllm-supervise resume`"
        if verb == "resume":
            return "resumed: a failure may change the configuration again"
        if verb == "reset":
            return "reset: failures, budget and the last known good are forgotten"
        if before.name is after.name and before.ending == after.ending:
            if verb == "stop" and after.name is StateName.STOPPED:
                return "already stopped"
            if verb == "step":
                raise RefusedError(why_no_step(self.policy, after, lever, direction))
            raise RefusedError(f"nothing to do, the instance is {after.name.value}")
        if after.ending is not None and after.ending.forced:
            return f"{verb}: nothing is waited for any more, the engine is killed"
        return f"{verb}: {before.name.value} → {after.name.value}"

    # --- the loop ---

    async def main(self, *, reset: bool) -> int:
        """Supervise until something ends it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        become_subreaper()
        watch_orphans(loop)
        surfaces = await self._open_surfaces()
        self._task(self._memory.watch())
        self._kernel.open()
        self._begin_run(reset=reset)
        if self.settings.systemd.ready == "supervising":
            self._say_ready()
        try:
            await self._turn_until_exit()
        finally:
            # A second signal during these last moments must not turn a clean end into a death by signal.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            self._gate.close()
            self._kernel.close()
            for task in tuple(self._tasks):
                task.cancel()
            for surface in surfaces:
                await surface.stop()
            await self._client.close()
            self._sampler.close()
        assert self._exit is not None
        return self._exit

    async def _turn_until_exit(self) -> None:
        while self._exit is None:
            asked = await self._next()
            before = self.state
            await self._step(asked.fact)
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_result((before, self.state))

    async def _next(self) -> _Asked:
        """The next fact; a tick when the state's timer is due. Tells the watchdog that the loop turns."""
        interval = watchdog_interval(os.environ)
        while True:
            now = asyncio.get_running_loop().time()
            if interval is not None and now >= self._watchdog_at:
                self._notifier.watchdog()
                self._watchdog_at = now + min(interval, PULSE_S)
            with contextlib.suppress(asyncio.QueueEmpty):
                return self._queue.get_nowait()
            wake = wake_at_ns(self.policy, self.state)
            due = PULSE_S if wake is None else (wake - boottime_ns()) / SECOND_NS
            if due <= 0:
                await asyncio.sleep(0)  # a timer that is due never shuts the others out
                return _Asked(Tick(at_ns=boottime_ns()))
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._queue.get(), min(due, PULSE_S))

    async def _step(self, fact: Fact) -> None:
        before = self.state
        try:
            self.state, actions = decide(self.policy, before, fact)
        except Exception:  # noqa: BLE001 - see below
            # Better a supervisor that does nothing about one fact than none: the state is kept and somebody is told.
            self._log.exception("decide failed; the state is kept", fact=type(fact).__name__, state=before.name.value)
            return
        if self.state is not before or actions:
            self._chronicle.record(fact)
        self._chronicle.note(before, self.state, fact)
        if isinstance(fact, HealthSeen) and fact.status == 200:
            self._gate.release()
        if isinstance(fact, LedgerSeen):
            self._note_version(fact.numbers.get("version"))
        if self.state.ready:
            self._say_ready()
        for action in actions:
            await self._carry_out(action)
        if self.state.name is not before.name:
            self._announce(before)

    async def _carry_out(self, action: act.Action) -> None:
        if isinstance(action, act.Decide):
            await self._record(action)
        elif isinstance(action, act.Reap):
            self._task(self._reap())
        elif isinstance(action, act.WatchGate):
            self._gate.watch(action.launch)
        elif isinstance(action, act.CloseGate):
            self._gate.close()
        elif isinstance(action, act.Spawn):
            self._spawn(action)
        elif isinstance(action, act.Canary):
            self._living().canary()
        elif isinstance(action, act.Stop):
            self._gate.release()
            self._living().stop(action.phase)
        elif isinstance(action, act.EndTree):
            self._gate.release()
            self._living().end_tree()
        elif isinstance(action, act.Force):
            self._living().force()
        elif isinstance(action, act.Clean):
            self._task(self._clean(action.target))
        elif isinstance(action, act.Proven):
            self._chronicle.proven(action)
        elif isinstance(action, act.GiveUp):
            self._give_up(action)
        elif isinstance(action, act.Exit):
            self._exit = action.code
        else:
            raise AssertionError(f"no way to carry out {action!r}")  # noqa: TRY004 - a hole in this table

    def _living(self) -> EngineLaunch:
        assert self._launch is not None, "an action of a launch without a launch"
        return self._launch

    # --- actions ---

    async def _record(self, action: act.Decide) -> None:
        decision = action.decision
        if not await self._chronicle.decided(decision):
            self._log.error("the decision could not be recorded in time; it is acted on", decision=decision.number)
        self._log.warning(
            decision.sentence,
            decision=decision.number,
            launch=decision.launch,
            kind=decision.kind.value,
            action=decision.action.value,
        )

    async def _reap(self) -> None:
        ended, survivors = await reap_leftovers(self._instance)
        for process in ended:
            self._log.warning("a process of an earlier launch was ended", pid=process.pid, command=process.command)
        self.post(LeftoversReaped(at_ns=boottime_ns(), ended=ended, survivors=survivors))

    def _spawn(self, action: act.Spawn) -> None:
        self._gate.opened()
        settings = self.settings
        launches = settings.state_dir / "launches"
        keep = settings.log
        with contextlib.suppress(OSError):
            launches.mkdir(mode=0o700, exist_ok=True)  # somebody may have tidied up
            prune_launch_logs(launches, keep.keep_launches, keep.keep_bytes, protect=(action.launch - 1,))
        order = order_of(settings, self._redactor, new_marker(self._instance), action, self._gaps)
        self._launch = EngineLaunch(order, self._client, self._outlets())
        self._exporter.launched()
        self._launch.begin()

    def _outlets(self) -> Outlets:
        return Outlets(
            post=self.post,
            line=self._line,
            settled=self._memory.settled,
            last_sample=lambda: self._memory.last,
            told=self._log.warning,
            buses=lambda: self._sampler.bus_ids,
        )

    async def _clean(self, target: str) -> None:
        """Locks of dead owners in the engine's caches, moved aside; where declared, the machine's page cache too."""
        if target == "drop_page_cache":
            try:
                await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "1", encoding="ascii")
                self._log.warning("the page cache was dropped, as [allow] drop-caches permits")
            except OSError as error:
                self._log.warning("the page cache could not be dropped", error=str(error))
        moved = await asyncio.to_thread(lambda: clear_locks(caches({**os.environ, **self.settings.engine.env})))
        for path in moved:
            self._log.warning("a lock without an owner was moved aside", path=path)
        self.post(Cleaned(at_ns=boottime_ns(), moved=moved))

    def _line(self, line: bytes) -> None:
        if self._output is not None:
            self._output.line(line)

    def _give_up(self, action: act.GiveUp) -> None:
        self._chronicle.gave_up(action)
        last = self.state.last_decision
        if last is None or action.text != last.sentence:
            self._log.error(action.text)

    def _announce(self, before: State) -> None:
        state = self.state
        launch = state.launch.number if state.launch is not None else None
        self._log.info(f"{before.name.value} → {state.name.value}", launch=launch)
        if state.name in (StateName.STOPPED, StateName.GATING, StateName.BACKING_OFF, StateName.GIVEN_UP):
            if self._launch is not None:
                self._gaps = self._launch.vigil.gaps
            self._launch = None
        if state.name is StateName.STOPPED:
            self._chronicle.complete("the engine was stopped")
        self._notifier.status(self._status_line())

    def _status_line(self) -> str:
        snapshot = self.snapshot()
        number = f", launch {snapshot.launch.number}" if snapshot.launch is not None else ""
        return f"{snapshot.state}{number}: {snapshot.given_up or snapshot.next_what}"

    def _note_version(self, version: Number | None) -> None:
        """Say once that the engine's release is not one of those whose messages were verified."""
        if version is None or version == self._version:
            return
        self._version = version
        if (doubt := outside_verified(str(version))) is not None:
            self._log.warning(doubt)

    def _say_ready(self) -> None:
        if not self._notified_ready:
            self._notified_ready = self._notifier.ready(self._status_line())

    # --- set-up and background ---

    def _begin_run(self, *, reset: bool) -> None:
        store, policy = self._store, self.policy
        boot, now = boot_id(), boottime_ns()
        self._chronicle.begin(boot)
        store.set_meta(INSTANCE_META, {"name": policy.name, "runtime_dir": str(self.settings.runtime_dir)})
        if reset:
            store.clear_exhausted()
        for warning in self.settings.warnings:
            self._log.warning(warning)
        self._log.info(
            "supervising",
            name=policy.name,
            policy=str(self.settings.path),
            state_dir=str(self.settings.state_dir),
            act=policy.act,
            version=__version__,
        )
        self.post(
            DaemonStarted(
                at_ns=now,
                boot_id=boot,
                next_launch=store.next_launch(),
                next_decision=store.next_decision(),
                last_known_good=store.last_known_good(policy.fingerprint),
                exhausted=store.exhausted(policy.fingerprint, boot, now),
                held=store.get_meta("held") is True,
                observations=self._chronicle.observations(),
                wall_s=int(time.time()),
            )
        )

    async def _open_surfaces(self) -> list[ControlSocket | HttpServer]:
        settings = self.settings
        path = settings.state_dir / STORE
        surfaces: list[ControlSocket | HttpServer] = []
        socket = ControlSocket(self, settings.runtime_dir / SOCKET, path)
        try:
            await socket.start()
            surfaces.append(socket)
        except OSError as error:
            raise ConfigError(str(error)) from error
        if settings.http.address is not None:
            http = HttpServer(self, self._exporter, path, settings.http.address, warn=self._log.warning)
            await http.start()
            surfaces.append(http)
        return surfaces

    def _signalled(self, number: signal.Signals) -> None:
        self._log.info("shutting down", signal=number.name)
        self._notifier.stopping("ending the engine")
        self.post(Commanded(at_ns=boottime_ns(), verb="shutdown", by=number.name))

    def _task(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a background task failed", task=task.get_name(), exc_info=task.exception())

    def _kernel_said(self, text: str) -> None:
        if self._launch is not None:
            self._launch.kernel_said(text)

    def _open_source(self) -> MemorySource:
        return source_of(self.settings.engine, self.settings.memory, os.environ)

    async def _port_owner(self) -> ProcessRef | None:
        engine = self.settings.engine
        if engine.url.startswith("unix:"):
            return await socket_owner(engine.url.removeprefix("unix:"))
        return await port_owner(engine.host, engine.port)

    def _memory_short(self) -> bool:
        return self.state.gate is not None and self.state.gate.short_since_ns is not None
