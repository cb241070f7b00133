"""Play a policy against a scenario: the core decides, the simulation answers every action with facts, time is virtual.

Event-driven: a sample reaches `decide` only where a threshold, a window or a timer could change its answer (a neighbour
moved, a window is full, a patience is over). With ``every_s`` the gate and the room beside a serving engine are sampled
at a fixed rate instead; the decisions are the same.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from supervisord_vllm.core import actions as act
from supervisord_vllm.core.climbing import room_matters
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import (
    BurstDone,
    CanaryDone,
    Cleaned,
    Commanded,
    DaemonStarted,
    DeviceMemory,
    Diagnosed,
    Exited,
    Fact,
    FatalSeen,
    GateSampled,
    HealthSeen,
    KernelSeen,
    LedgerSeen,
    LeftoversReaped,
    LoadSeen,
    PhaseSeen,
    ProcessRef,
    RoomSeen,
    Spawned,
    Stalled,
    Tick,
    TreeEnded,
)
from supervisord_vllm.core.levers import NUM_SEQS, UTILIZATION, WEIGHTS, Levers, Weights
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import State, StateName, wake_at_ns
from supervisord_vllm.rehearsal import proving
from supervisord_vllm.rehearsal.engine import compiled_as, served, settings_of
from supervisord_vllm.rehearsal.service import PAGE_S, Service, load_at, next_load
from supervisord_vllm.simulation.fault import Fault
from supervisord_vllm.simulation.ledger import kv_bytes_per_token
from supervisord_vllm.simulation.virtual import Course, Event, Neighbour, launch
from supervisord_vllm.simulation.virtual_scenario import Scenario
from supervisord_vllm.strain import Strain

WALL_S = 1_800_000_000
"""Wall time at which every rehearsal begins."""
CONTEXT_GUESS = round(0.6 * (1 << 30))
"""What the daemon takes for an engine's CUDA context before one has taught it better."""
NS = 1
"""Just before a change: one nanosecond."""


@dataclass
class Played:
    """One launch as it was played. Times are seconds of virtual time since the beginning."""

    number: int
    levers: Levers
    at_s: float
    course: Course
    notes: tuple[str, ...] = ()
    ready_s: float | None = None
    proven_s: float | None = None
    ended_s: float | None = None
    outcome: str = "runs"


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of the timeline: what a person would have seen."""

    at_s: float
    state: str
    what: str


@dataclass
class Judged:
    """A decision with its time and what came of it."""

    at_s: float
    decision: Decision
    outcome: str = ""


@dataclass
class Play:
    """The whole of it. `run` plays; everything else is its record."""

    policy: Policy
    scenario: Scenario
    every_s: float | None = None
    state: State = field(default_factory=State.initial)
    now: int = 0
    timeline: list[Moment] = field(default_factory=list)
    launches: list[Played] = field(default_factory=list)
    decisions: list[Judged] = field(default_factory=list)
    facts: int = 0
    exit: int | None = None
    given_up: str | None = None
    downtime_s: float = 0.0
    pages: int = 0

    def __post_init__(self) -> None:
        self._queue: list[tuple[int, int, Fact]] = []
        self._serial = 0
        self._neighbours = self.scenario.neighbours
        self._gate: int | None = None
        self._living: Played | None = None
        self._failure: Diagnosis | None = None
        self._compiled: set[tuple[object, ...]] = set()
        self._down_since: int | None = 0
        self._dying: tuple[DeviceMemory, ...] = ()
        self._service: Service | None = None
        self._scale = proving.Scale()
        memory: dict[str, object] = {}
        self._strain = Strain(self.policy, memory.get, memory.__setitem__, self._step)
        self._look_at = 0
        started = DaemonStarted(at_ns=0, boot_id="rehearsal", next_launch=1, next_decision=1, wall_s=WALL_S)
        self._send(0, started)
        for operator in self.scenario.operators:
            self._send(operator.at_s, Commanded(at_ns=0, verb=operator.verb, by="an operator"), absolute=True)  # type: ignore[arg-type]  # checked on reading

    # --- time ---

    def _send(self, seconds: float, fact: Fact, *, absolute: bool = False) -> None:
        at = int(seconds * SECOND) + (0 if absolute else self.now)
        self._serial += 1
        heapq.heappush(self._queue, (at, self._serial, replace(fact, at_ns=at)))

    @property
    def seconds(self) -> float:
        """Virtual seconds since the beginning."""
        return self.now / SECOND

    def run(self) -> Play:
        """Play to the end of the scenario, or until the daemon ends."""
        end = int(self.scenario.duration_s * SECOND)
        while self.exit is None:
            wake = wake_at_ns(self.policy, self.state)
            upcoming = self._queue[0][0] if self._queue else None
            times = [at for at in (wake, upcoming) if at is not None]
            if not times or min(times) > end:
                break
            if wake is not None and (upcoming is None or wake < upcoming):
                self.now = max(self.now, wake)
                self._step(Tick(at_ns=self.now))
            else:
                self.now, _, fact = heapq.heappop(self._queue)
                if isinstance(fact, Tick):
                    self._look()
                else:
                    self._step(self._filled(fact))
        if self.exit is None:
            self.now = max(self.now, end)
        self._count_downtime(ready=True)
        return self

    def _filled(self, fact: Fact) -> Fact:
        """A fact with the memory that is seen at its moment."""
        if isinstance(fact, GateSampled):
            return replace(fact, devices=self._devices())
        if isinstance(fact, Diagnosed):
            return replace(fact, devices=self._dying, after=self._devices())
        return fact

    def _step(self, fact: Fact) -> None:
        living = self._living
        if isinstance(fact, Exited):
            if living is None or living.number != fact.launch or living.ended_s is not None:
                return
            self._dying = self._devices()
            living.ended_s = self.seconds
            if living.course.orphan_s:
                size = living.course.held(self.seconds)
                orphan = Neighbour(
                    self.seconds,
                    size,
                    self.seconds + living.course.orphan_s,
                    4000 + fact.launch,
                    "vllm",
                    "VLLM::EngineCore",
                )
                self._neighbours = self._neighbours.also(orphan)
        before = self.state
        self.facts += 1
        self.state, actions = decide(self.policy, before, fact)
        self._strain.noted(before, self.state, fact)
        for action in actions:
            self._carry_out(action)
        self._tell(before, fact)
        if isinstance(fact, (CanaryDone, BurstDone)):
            self._scale.begins(self.now, self._devices())
        if isinstance(fact, GateSampled) and self._gate == fact.launch:
            self._sample_again()
        if self.state.ready is not before.ready:
            self._count_downtime(ready=self.state.ready)

    def _count_downtime(self, *, ready: bool) -> None:
        if ready and self._down_since is not None:
            self.downtime_s += (self.now - self._down_since) / SECOND
            self._down_since = None
        elif not ready and self._down_since is None:
            self._down_since = self.now

    # --- what is seen ---

    def _devices(self) -> tuple[DeviceMemory, ...]:
        device, living = self.scenario.card.device, self._living
        own = living.course.held(self.seconds) if living is not None and living.ended_s is None else 0
        held = self._neighbours.held(self.seconds)
        holders = tuple(
            ProcessRef(one.pid, one.user, one.command, one.bytes, ours=one.user == "vllm")
            for one in self._neighbours.holders(self.seconds)
        )
        free = max(0, device.usable - held - own)
        return (DeviceMemory(device.uuid, device.usable, free, CONTEXT_GUESS, own, holders),)

    def _sample(self, seconds: float) -> None:
        launch = self._gate or 0
        self._send(seconds, GateSampled(at_ns=0, launch=launch, devices=()))

    def _sample_at(self, at: int) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (at, self._serial, GateSampled(at_ns=at, launch=self._gate or 0)))

    def _sample_again(self) -> None:
        """The next look at the gate: at a fixed rate, or where it could make a difference."""
        if self.every_s is not None:
            self._sample(self.every_s)
            return
        gate, window = self.state.gate, self.policy.gate.window_ns
        times: list[int] = []
        if gate is not None:
            times.append(gate.since_ns + window)
            if gate.short_since_ns is not None:
                times.append(gate.short_since_ns + self.policy.gate.patience_ns)
        for change in self._neighbours.changes():
            # Right before it, at it, and once it fills the window: between these nothing can change the answer.
            at = _at_or_after(change)
            times += (at - NS, at, at + window)
        later = min((at for at in times if at > self.now), default=None)
        if later is not None:
            self._sample_at(later)

    def _look(self) -> None:
        """What a serving engine's surroundings show: room beside it, and a page of its metrics."""
        living = self._living
        if living is None or living.ended_s is not None or self.state.name is not StateName.SERVING:
            return
        if self.now != self._look_at:  # of a chain of looks that another has replaced
            return
        devices = self._devices()
        if room_matters(self.state, devices):
            self._step(RoomSeen(at_ns=self.now, launch=living.number, devices=devices))
        busy = self._page(living)
        changes = (self._neighbours.next_change(self.seconds), next_load(self.scenario.loads, self.seconds))
        upcoming = min((at for at in changes if at is not None), default=None)
        if busy:
            self._look_in(PAGE_S)
        elif self.every_s is not None:
            self._look_in(self.every_s)
        elif upcoming is not None:
            self._look_in(max(upcoming - self.seconds, 1e-9))

    def _look_in(self, seconds: float) -> None:
        self._look_at = self.now + int(seconds * SECOND)
        self._send(seconds, Tick(at_ns=0))

    def _page(self, living: Played) -> bool:
        """A page of /metrics, where the scenario has any load; whether there is more to see soon."""
        load, service = load_at(self.scenario.loads, self.seconds), self._service
        if service is None or not self.scenario.loads:
            return False
        sample = service.page(self.now, load)
        self.pages += 1
        idle = sample.running + sample.waiting == 0
        launch = self.state.launch
        if launch is not None and launch.load != ("idle" if idle else "busy"):
            self._step(LoadSeen(at_ns=self.now, launch=living.number, running=sample.running, waiting=sample.waiting))
        self._strain.page(self.state, sample, service.kv_tokens)
        return load is not None or not idle

    # --- the shell ---

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.Decide(decision):
                if self.decisions and not self.decisions[-1].outcome:
                    self.decisions[-1].outcome = f"followed by decision {decision.number}"
                self.decisions.append(Judged(self.seconds, decision))
            case act.Reap():
                self._send(0.1, LeftoversReaped(at_ns=0))
            case act.WatchGate(number):
                self._gate = number
                self._sample(0.0)
            case act.CloseGate():
                self._gate = None
            case act.Spawn():
                self._spawn(action)
            case act.Canary() | act.Burst() | act.Weigh():
                self._prove(action)
            case act.Stop(number, phase):
                assert self._living is not None
                wait = self._living.course.stop_s if phase != "starting" else 5.0
                self._end(number, wait, Diagnosis(Kind.NONE))
            case act.EndTree(number):
                self._end(number, None, self._failure or Diagnosis(Kind.NONE))
            case act.Clean():
                self._send(0.1, Cleaned(at_ns=0))
            case act.Proven(number, _):
                self.launches[-1].proven_s = self.seconds
                self._done(f"launch {number} is proven")
            case act.GiveUp(text, _):
                self.given_up = text
                self._done("gave up")
            case act.Exit(code):
                self.exit = code
            case act.Force():
                pass
            case _:
                raise AssertionError(action)

    def _prove(self, action: act.Canary | act.Burst | act.Weigh) -> None:
        assert self._living is not None
        course, at_s = self._living.course, self.seconds
        if isinstance(action, act.Weigh):
            self._send(0.0, self._scale.weighed(action.launch, self.now, self._devices()))
            return
        if isinstance(action, act.Burst):
            answers = proving.burst(action, course, at_s)
        else:
            answers = proving.canary(action.launch, course, at_s)
        for after, fact in answers:
            self._send(after, fact)

    def _done(self, outcome: str) -> None:
        if self.decisions and not self.decisions[-1].outcome:
            self.decisions[-1].outcome = outcome

    def _end(self, number: int, wait: float | None, verdict: Diagnosis) -> None:
        """The exit (unless it is there already), the verdict, the end of the tree."""
        after = 0.0 if wait is None else wait
        if wait is not None:
            self._send(after, Exited(at_ns=0, launch=number, signal=15))
        self._send(after + 0.5, Diagnosed(at_ns=0, launch=number, diagnosis=verdict))
        self._send(after + 1.0, TreeEnded(at_ns=0, launch=number))

    def _spawn(self, action: act.Spawn) -> None:
        if self._living is not None and self._living.ended_s is None:
            raise AssertionError(f"two engines at once: launches {self._living.number} and {action.launch}")
        card, levers = self.scenario.card, action.levers
        weights = levers.get(WEIGHTS)
        stands = served(card, weights if isinstance(weights, Weights) else None)
        settings = settings_of(card, stands.model, levers)
        key = compiled_as(stands.model, settings)
        faults = self._faults(action)
        for fault in faults:
            if fault.kind in ("neighbour-takes", "await-neighbour"):
                self._arrives(fault)
        course = launch(
            card,
            stands.model,
            settings,
            self._neighbours,
            start_s=self.seconds,
            cold=key not in self._compiled,
            faults=faults,
            burst=proving.burst_size(self.policy, settings.max_num_seqs),
        )
        if any(event.what == "phase" and event.name == "profiling" for event in course.events) and not settings.eager:
            self._compiled.add(key)
        self._gate = None
        self._living = Played(action.launch, levers, self.seconds, course, (stands.note,) if stands.note else ())
        self.launches.append(self._living)
        self._failure = None
        self._service = Service(card.timing, settings.max_num_seqs, course.kv_tokens, settings.eager)
        if course.failure is not None:
            self._failure = _diagnosis(course)
        self._send(
            0.01, Spawned(at_ns=0, launch=action.launch, pid=4000 + action.launch, start_ticks=1, argv=(), log="")
        )
        for event in course.events:
            for fact in self._seen(action.launch, event, course):
                self._send(event.at_s, fact, absolute=True)

    def _faults(self, action: act.Spawn) -> tuple[Fault, ...]:
        names = {name for name, _ in action.environment}
        cured = {"fragmentation": "PYTORCH_ALLOC_CONF", "corrupt-cache": "VLLM_DISABLE_COMPILE_CACHE"}
        return tuple(f for f in self.scenario.faults_of(action.launch) if cured.get(f.kind) not in names)

    def _arrives(self, fault: Fault) -> None:
        """A neighbour that comes at a stage of a launch: the stage's usual time is taken."""
        offset = _STAGE_S.get(fault.at, 0.0) + (fault.after or 0.0)
        since = self.seconds + offset
        until = None if fault.seconds is None else since + fault.seconds
        self._neighbours = self._neighbours.also(Neighbour(since, fault.bytes or 0, until))

    def _seen(self, number: int, event: Event, course: Course) -> list[Fact]:
        match event.what:
            case "phase":
                return [PhaseSeen(at_ns=0, launch=number, phase=event.name)]  # type: ignore[arg-type]  # a phase
            case "ledger":
                return [LedgerSeen(at_ns=0, launch=number, numbers=event.numbers)]
            case "healthy":
                return [HealthSeen(at_ns=0, launch=number, status=200)]
            case "fatal":
                return [
                    FatalSeen(at_ns=0, launch=number, text=event.name),
                    HealthSeen(at_ns=0, launch=number, status=503),
                ]
            case "stalled":
                return [Stalled(at_ns=0, launch=number, what="hung", text=event.name)]
            case "wedged":
                return [Stalled(at_ns=0, launch=number, what="wedged", text=event.name)]
            case "kernel":
                xid = event.numbers.get("xid")
                return [
                    KernelSeen(
                        at_ns=0,
                        launch=number,
                        kind="xid",
                        text=event.name,
                        bus_id="0000:3b:00",
                        number=xid if isinstance(xid, int) else None,
                        ours=True,
                    )
                ]
            case _:
                failure = course.failure
                return [
                    Exited(
                        at_ns=0,
                        launch=number,
                        code=failure.code if failure is not None else 0,
                        signal=failure.signal if failure is not None and failure.code is None else None,
                    )
                ]

    # --- the record ---

    def _tell(self, before: State, fact: Fact) -> None:
        state, name = self.state, self.state.name.value
        living = self._living
        if living is not None and state.ready and not before.ready and living.ready_s is None:
            living.ready_s = self.seconds
        if isinstance(fact, TreeEnded) and living is not None and living.number == fact.launch:
            failed = before.ending is not None and before.ending.why == "failure"
            last = self.state.last_decision
            living.outcome = last.kind.value if failed and last is not None else "stopped"
        if state.name is before.name:
            return
        self.timeline.append(Moment(self.seconds, name, self._what(before)))
        if state.name is StateName.SERVING and living is not None:
            if not self.scenario.loads:
                self._send(0.0, LoadSeen(at_ns=0, launch=living.number))
            self._look_in(0.0)
        if state.name is StateName.DRAINING and self.scenario.loads and self._service is not None:
            self._send(self._service.drained_s, LoadSeen(at_ns=0, launch=self.launches[-1].number))

    def _what(self, before: State) -> str:
        launch, state = self.state.launch, self.state
        number = launch.number if launch is not None else 0
        match state.name:
            case StateName.GATING:
                return f"the gate for launch {state.next_launch}: port, memory and lock are watched"
            case StateName.STARTING:
                return f"launch {number} is spawned"
            case StateName.PROVING:
                return f"launch {number} is healthy: its proof begins"
            case StateName.SERVING:
                return f"launch {number} is proven and serves" if before.name is StateName.PROVING else "it serves on"
            case StateName.DRAINING:
                return f"launch {number} takes no new requests"
            case StateName.STOPPING:
                return (
                    f"launch {number} is being ended" if state.ending is None else _ENDINGS[state.ending.why] % number
                )
            case StateName.BACKING_OFF:
                return f"launch {state.next_launch} waits for its back-off"
            case StateName.GIVEN_UP:
                return state.given_up or "nothing automatic is right"
            case _:
                return "no engine is wanted" if state.name is StateName.STOPPED else "leftovers are looked for"

    @property
    def utilization(self) -> int | None:
        """The utilization of the last launch, per mille."""
        return self.launches[-1].levers.number(UTILIZATION) if self.launches else None

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache of the engine that serves at the end; 0 where none does."""
        return self.launches[-1].course.kv_tokens if self.state.ready and self.launches else 0

    @property
    def sequences(self) -> int | None:
        """The number of sequences of the last launch."""
        return self.launches[-1].levers.number(NUM_SEQS) if self.launches else None


def _at_or_after(seconds: float) -> int:
    """The first nanosecond at which a moment in seconds has come."""
    at = int(seconds * SECOND)
    while at / SECOND < seconds:
        at += 1
    return at


_ENDINGS = {
    "failure": "launch %d failed: its tree is ended and its output judged",
    "operator": "launch %d is stopped at an operator's word",
    "shutdown": "launch %d is stopped: the daemon ends",
    "planned": "launch %d makes room for another configuration",
}
_STAGE_S = {"loading": 37.5, "profiling": 61.0, "kv-alloc": 62.0, "capture": 62.2, "warm-up": 63.5, "running": 90.0}
"""Seconds from the spawn to a stage of a usual start."""


def _diagnosis(course: Course) -> Diagnosis:
    failure = course.failure
    assert failure is not None
    evidence = (Evidence(1, "EngineCore", failure.text),) if failure.text else ()
    return Diagnosis(
        Kind(failure.kind),
        failure.phase,
        numbers=dict(failure.numbers),
        confidence=0.98,
        evidence=evidence,
        summary=failure.text,
        signature=failure.signature,
    )


def kv_bytes(play: Play) -> int:
    """Bytes of the KV cache of the engine that serves at the end."""
    if not play.launches:
        return 0
    last = play.launches[-1]
    weights = last.levers.get(WEIGHTS)
    model = served(play.scenario.card, weights if isinstance(weights, Weights) else None).model
    dtype = settings_of(play.scenario.card, model, last.levers).kv_cache_dtype
    return play.kv_tokens * kv_bytes_per_token(model, dtype)
