"""The daemon: one task owns the state; everything else puts facts into its queue or reads a snapshot.

A fact that changed the state or caused an action is recorded, so that replay of the record gives the same decisions. A
decision is on the disk before it is acted on, or after 2 s it is acted on and marked unrecorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog

from supervisord_vllm import __version__
from supervisord_vllm.api import ControlSocket, Exporter, HttpServer, RefusedError, Verb
from supervisord_vllm.chronicle import Chronicle
from supervisord_vllm.clock import SECOND_NS, Now, boot_id, boottime_ns, utc_offset_s
from supervisord_vllm.clockwatch import watch_clock
from supervisord_vllm.config import ConfigError, Settings
from supervisord_vllm.core import actions as act
from supervisord_vllm.core.adopting import carry
from supervisord_vllm.core.diagnosis import Action, Number
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
from supervisord_vllm.core.progress import Gaps
from supervisord_vllm.core.state import State, StateName, wake_at_ns
from supervisord_vllm.engine.metrics import EngineLoad, NoPage
from supervisord_vllm.engine.probe import EngineClient
from supervisord_vllm.engine.signature import outside_verified
from supervisord_vllm.exitcodes import ExitCode
from supervisord_vllm.handover import Handover, TrialError, try_command
from supervisord_vllm.host.gate import Gate
from supervisord_vllm.host.leftovers import caches, clear_locks
from supervisord_vllm.host.memory import MemorySource, Sampler, source_of
from supervisord_vllm.host.port import port_owner, socket_owner
from supervisord_vllm.host.process import adopt, become_subreaper, new_marker, watch_orphans
from supervisord_vllm.host.systemd import PULSE_S, Notifier, Pulse
from supervisord_vllm.host.tree import reap_leftovers
from supervisord_vllm.inheritance import NOTHING, inherit
from supervisord_vllm.kernelwatch import KernelWatch
from supervisord_vllm.launch import EngineLaunch, Outlets
from supervisord_vllm.log import EngineOutput
from supervisord_vllm.memorywatch import MemoryWatch
from supervisord_vllm.orders import order_of
from supervisord_vllm.places import INSTANCE_META, SOCKET, STORE, instance
from supervisord_vllm.proof_progress import Flying
from supervisord_vllm.proofwatch import ProofWatch
from supervisord_vllm.redaction import Redactor
from supervisord_vllm.replies import reply
from supervisord_vllm.series import Series
from supervisord_vllm.status import Document, Snapshot, headline, snapshot_of
from supervisord_vllm.store import Store, durable
from supervisord_vllm.store.copied import Place, copied_position
from supervisord_vllm.store.launch_logs import prune_launch_logs
from supervisord_vllm.strain import Strain

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the daemon to end."""


@dataclass(frozen=True)
class _Asked:
    """A fact that somebody waits for: the future gets the states before and after it."""

    fact: Fact
    answer: asyncio.Future[tuple[State, State]] | None = None


class Daemon:
    """One instance. Made inside a running loop; `main` returns the exit status."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        output: EngineOutput | None,
        redactor: Redactor,
        handover: Handover | None = None,
    ) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.state = State.initial()
        self._store = store
        self._output = output
        self._redactor = redactor
        self._log = structlog.get_logger()
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue()
        self._notifier = Notifier(os.environ)
        self._pulse = Pulse(self._notifier, os.environ)
        self._instance = instance(settings.state_dir)
        engine = settings.engine
        self._client = EngineClient(engine.url, engine.api_key, engine.ca_file, engine.verify_tls)
        self._sampler = Sampler(self._open_source, timeout_s=settings.memory.timeout_s)
        self._gate = Gate(self._sampler, self._port_owner, settings.runtime_dir, self.post, self._memory_short)
        self._exporter = Exporter(self, __version__)
        self._launch: EngineLaunch | None = None
        self._chronicle = Chronicle(store, self._exporter, settings.policy)
        self._strain = Strain(settings.policy, store.get_meta, store.set_meta, self.post)
        self._exit: int | None = None
        self._memory = MemoryWatch(self._sampler, self.post, lambda: self.state, lambda: self._launch)
        self._kernel = KernelWatch(
            self.post,
            lambda: self.state.launch.number if self.state.launch is not None else 0,
            lambda: self._memory.own_pids,
            lambda: self._sampler.bus_ids,
            self._kernel_said,
        )
        self._proof = ProofWatch(
            self.policy,
            self._memory,
            self.post,
            lambda: self.state,
            self._flying,
            lambda: self._notifier.status(self._status_line()),
            self._exporter.proof_failed,
            terminal=os.isatty(2),
        )
        self._memory.listener = self._proof.sampled
        self._notified_ready = False
        self._version: Number | None = None
        self._shutting_down = False
        self._gaps = Gaps()
        self._series = Series(settings.poll.metrics.seconds)
        self._handover = handover
        self._inherited = NOTHING
        self._upgrading = False
        self._begun = time.time()
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
            growth=self._memory.creep.of(self.state.launch.number if self.state.launch is not None else 0),
            memory_age_s=self._sampler.age_s,
            memory_error=self._memory.error,
            proof=self._proof.document(),
            load=self._launch.load if self._launch is not None else None,
            strained=self._strain.view,
            outcome=None if last is None else self._chronicle.outcome(last.number),
            earlier=self._chronicle.earlier,
            pid=os.getpid(),
            version=__version__,
            daemon_since=self._begun,
            counters={
                "facts": self.state.dropped,
                "store_entries": self._store.lost,
                "engine_lines": self._output.dropped if self._output is not None else 0,
            },
        )

    def series(self) -> Document:
        """The load of the last fifteen minutes (see `api.Control`)."""
        return self._series.document(self.policy.name, Now.read())

    async def command(
        self,
        verb: Verb,
        reason: str,
        by: str,
        lever: str = "",
        direction: Literal["up", "down"] = "down",
        for_ns: int | None = None,
    ) -> str:
        """An operator's word (see `api.Control`)."""
        if verb == "upgrade":
            return await self._upgrade(reason, by)
        now = boottime_ns()
        fact = Commanded(at_ns=now, verb=verb, reason=reason, by=by, lever=lever, direction=direction, for_ns=for_ns)
        before, after = await self._decided(fact)
        self._log.info("command", verb=verb, by=by, reason=reason or None, state=after.name.value)
        return reply(self.policy, fact, before, after)

    async def _decided(self, fact: Fact) -> tuple[State, State]:
        """Put a fact into the queue and wait for its turn: the states before and after it."""
        answer: asyncio.Future[tuple[State, State]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Asked(fact, answer))
        return await answer

    async def _upgrade(self, reason: str, by: str) -> str:
        """Let the program behind our own command take over in this process, once it has said that it can."""
        if self._upgrading or self._exit is not None:
            raise RefusedError("the daemon is ending already")
        if self.state.name is StateName.ADOPTING:
            raise RefusedError("the daemon is only starting; try again in a moment")
        carried = json.dumps(carry(self.state))
        try:
            version = await asyncio.to_thread(try_command, carried, os.environ, self.settings.state_dir)
        except TrialError as error:
            raise RefusedError(f"it would not start, so this daemon goes on: {error}") from error
        if self._launch is not None:
            await self._launch.settled()
        await self._decided(Tick(at_ns=boottime_ns()))  # whatever was seen before this is in the state
        if self._exit is not None:
            raise RefusedError("the daemon is ending already")
        self._log.warning("upgrade", by=by, reason=reason or None, before=__version__, after=version)
        self._upgrading, self._exit = True, ExitCode.DONE
        self.post(Tick(at_ns=boottime_ns()))
        launch = self.state.launch
        engine = "" if launch is None else f"; launch {launch.number} (pid {launch.pid}) goes on"
        return f"upgrade: {__version__} → {version}{engine}"

    def _given(self, surfaces: Sequence[ControlSocket | HttpServer]) -> Handover:
        """What the daemon that replaces us gets."""
        locks, devices = self._gate.locks
        control = next((s.keep() for s in surfaces if isinstance(s, ControlSocket)), None)
        http = next((s.keep() for s in surfaces if isinstance(s, HttpServer)), ())
        return Handover(json.dumps(carry(self.state)), (), locks, devices, control, http)

    # --- the loop ---

    async def main(self, *, reset: bool) -> int | Handover:
        """Supervise until something ends it: the exit status, or what the daemon gets that replaces this one."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # those that came while this daemon replaced another
        self._inherited = inherit(self._chronicle.left(), self._handover, self._instance, boot_id())
        if self._handover is not None and self._handover.device_locks:
            # Whatever state goes on: nobody else would let go of them, and a gate would wait for ourselves.
            self._gate.take_over(self._handover.device_locks, self._handover.devices)
        become_subreaper()
        watch_orphans(loop)
        surfaces = await self._open_surfaces()
        self._task(self._memory.watch())
        self._task(watch_clock(self.post, lambda: self.state))
        self._kernel.open()
        self._begin_run(reset=reset)
        if self.settings.systemd.ready == "supervising":
            self._say_ready()
        try:
            await self._turn_until_exit()
        finally:
            if self._upgrading:
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # they wait for the daemon that follows
            for number in ENDING:
                loop.remove_signal_handler(number)
                # A second signal during these last moments must not turn a clean end into a death by signal.
                signal.signal(number, signal.SIG_DFL if self._upgrading else signal.SIG_IGN)
            given = self._given(surfaces) if self._upgrading else None
            if given is None:
                self._gate.close()
            if given is None and self._exit is not None:
                self._chronicle.end()
            self._kernel.close()
            for task in tuple(self._tasks):
                task.cancel()
            for surface in surfaces:
                await surface.stop()
            await self._client.close()
            self._sampler.close()
        assert self._exit is not None
        return self._exit if given is None else given

    async def _turn_until_exit(self) -> None:
        while self._exit is None:
            asked = await self._next()
            before = self.state
            await self._step(asked.fact)
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_result((before, self.state))

    async def _next(self) -> _Asked:
        """The next fact; a tick when the state's timer is due. Tells systemd that the loop turns."""
        while True:
            awaited = self._shutting_down or not self._notified_ready
            self._pulse.beat(asyncio.get_running_loop().time(), awaited=awaited)
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
            # What cannot be taken back is done once the next daemon would know of it.
            lasting = any(isinstance(action, (act.Spawn, act.Stop)) for action in actions)
            carried = None
            if any(isinstance(action, act.Exit) for action in actions):
                self._chronicle.end()  # killed from here on, the next daemon must not take `stopped` for its own wish
            else:
                carried = self._chronicle.carry(self.state, wanted=lasting)
            if carried is not None and not await durable(carried):
                self._log.warning("the state could not be kept in time: a daemon after this one would start anew")
        self._chronicle.note(before, self.state, fact)
        self._proof.noted(before, self.state, fact)
        self._strain.noted(before, self.state, fact)
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
        elif isinstance(action, act.Adopt):
            self._adopt(action)
        elif isinstance(action, (act.Canary, act.Burst, act.Weigh)):
            self._prove(action)
        elif isinstance(action, act.Stop):
            self._gate.release()
            self._living().stop(action.phase, action.waited_ns / SECOND_NS, signalled=action.signalled)
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

    def _prove(self, action: act.Canary | act.Burst | act.Weigh) -> None:
        if isinstance(action, act.Weigh):
            self._task(self._proof.weigh(action))
        elif isinstance(action, act.Burst):
            self._living().burst(action)
        else:
            self._living().canary()

    def _living(self) -> EngineLaunch:
        assert self._launch is not None, "an action of a launch without a launch"
        return self._launch

    # --- actions ---

    async def _record(self, action: act.Decide) -> None:
        decision = action.decision
        if not await self._chronicle.decided(decision):
            self._log.error("the decision could not be recorded in time; it is acted on", decision=decision.number)
        somebody_is_needed = decision.acted and decision.action in (Action.STOP_EXPLAIN, Action.STOP_OPERATOR)
        say = self._log.error if somebody_is_needed else self._log.warning
        say(
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
        firsts = self._chronicle.first_launches(action.launch, self.state.incident.launches)
        protect = (action.launch - 1, *sorted(firsts)[-2:])

        def prepare() -> None:
            with contextlib.suppress(OSError):
                launches.mkdir(mode=0o700, exist_ok=True)  # somebody may have tidied up
                prune_launch_logs(launches, keep.keep_launches, keep.keep_bytes, protect, firsts)

        order = order_of(settings, self._redactor, new_marker(self._instance), action, self._gaps)
        self._launch = EngineLaunch(order, self._client, self._outlets())
        self._exporter.launched()
        self._series.launched(boottime_ns(), action.launch)
        self._launch.begin(prepare)

    def _adopt(self, action: act.Adopt) -> None:
        """Go on with the engine that was found, whether it lives or has ended."""
        launches, marker = self.settings.state_dir / "launches", self._inherited.found.marker
        order = order_of(self.settings, self._redactor, marker, action, self._gaps)
        copied = copied_position(launches, action.launch)
        if copied is None:  # nobody kept it: rather lose lines of the copy than double them
            with contextlib.suppress(OSError):
                copied = order.log.stat().st_size
        child = adopt(action.pid, action.start_ticks, marker, order.log)
        self._launch = EngineLaunch(order, self._client, self._outlets())
        self._launch.adopt(child, healthy=action.healthy, copied=copied or 0, cut=action.cut)
        if self.state.name is StateName.STARTING and self.state.launch is not None and not self._gate.locks[0]:
            self._gate.lock(tuple(device.device for device in self.state.launch.gate_devices))
        self._log.info(
            "an engine of the daemon before is adopted",
            launch=action.launch,
            pid=action.pid,
            lives=self._inherited.found.engine == "lives",
            state=self.state.name.value,
        )
        self._notifier.status(self._status_line())

    def _outlets(self) -> Outlets:
        return Outlets(
            post=self.post,
            line=self._line,
            settled=self._memory.settled,
            last_sample=lambda: self._memory.last,
            told=self._log.warning,
            buses=lambda: self._sampler.bus_ids,
            page=self._page,
            moved=self._proof.moved,
        )

    def _flying(self) -> Flying | None:
        """How far the burst of the present launch is."""
        burst = self._launch.bursting if self._launch is not None else None
        return None if burst is None else Flying(burst.done, burst.yields)

    def _page(self, launch: int, page: EngineLoad | NoPage) -> None:
        """What /metrics of the present launch said, or that it said nothing."""
        if isinstance(page, EngineLoad):
            self._series.page(boottime_ns(), launch, page)
        if self.state.launch is not None and self.state.launch.number == launch:
            self._strain.read(self.state, page, boottime_ns())

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

    def _line(self, line: bytes, position: int) -> None:
        launch = self.state.launch
        if self._output is not None:
            self._output.line(line, None if launch is None else Place(launch.number, position))

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
        return headline(self.snapshot())

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
        wall_s = int(time.time())
        lasting = self._chronicle.lasting(now, wall_s)
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
                hold=lasting.hold,
                failed_climbs=lasting.failed_climbs,
                roll_backs=lasting.roll_backs,
                planned=lasting.planned,
                observations=self._chronicle.observations(),
                carried=self._inherited.carried,
                engine=self._inherited.found.engine,
                wall_s=wall_s,
                utc_offset_s=utc_offset_s(),
            )
        )

    async def _open_surfaces(self) -> list[ControlSocket | HttpServer]:
        settings, handover = self.settings, self._handover
        path = settings.state_dir / STORE
        surfaces: list[ControlSocket | HttpServer] = []
        socket = ControlSocket(self, settings.runtime_dir / SOCKET, path)
        try:
            await socket.start(handover.control if handover is not None else None)
            surfaces.append(socket)
        except OSError as error:
            raise ConfigError(str(error)) from error
        if settings.http.address is not None:
            http = HttpServer(self, self._exporter, path, settings.http.address, warn=self._log.warning)
            await http.start(handover.http if handover is not None else ())
            surfaces.append(http)
        return surfaces

    def _signalled(self, number: signal.Signals) -> None:
        self._log.info("shutting down", signal=number.name)
        self._notifier.stopping("ending the engine")
        self._shutting_down = True
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
