"""A world for `decide` in virtual time: it answers every action with facts, as a script says. No I/O, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from supervisord_vllm.core import actions as act
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Diagnosis, Kind
from supervisord_vllm.core.facts import (
    BurstDone,
    CanaryDone,
    Cleaned,
    Commanded,
    DaemonStarted,
    DeviceMemory,
    DeviceSoak,
    Diagnosed,
    Exited,
    Fact,
    GateSampled,
    HealthSeen,
    LedgerSeen,
    LeftoversReaped,
    ProcessRef,
    SoakDone,
    Spawned,
    SpawnFailed,
    Tick,
    TreeEnded,
    Verb,
)
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import State, wake_at_ns

TOTAL = round(139.8 * GIB)
CONTEXT = round(0.51 * GIB)


@dataclass
class Outcome:
    """What one launch does: come up after ``healthy_s`` or never, print numbers, end with a diagnosis or never."""

    healthy_s: float | None = 40.0
    numbers: dict[str, int | float | str] = field(default_factory=dict)
    fails_s: float | None = None
    diagnosis: Diagnosis | None = None
    code: int | None = 0
    canary: bool = True
    canary_status: int | None = None
    dies_in: Literal["", "canary", "burst"] = ""
    burst_failed: int = 0
    burst_silent: bool = False
    soak_takes: int = 0
    """Bytes that the engine takes during its soak, beyond what it requested."""
    unexecuted: str | None = None
    lasting: bool = True


Script = Callable[[act.Spawn, "World"], Outcome]


class World:
    """Runs one daemon from its start. ``held`` is what neighbours hold on the card, in bytes, as a function of time."""

    def __init__(self, policy: Policy, script: Script, *, last_known_good: Levers | None = None) -> None:
        self.policy, self.script = policy, script
        self.now = 1000 * SECOND
        self.began = self.now
        self.state = State.initial()
        self.queue: list[tuple[int, int, Fact]] = []
        self.serial = 0
        self.foreign = 0
        self.own = 0
        self.port_owner: ProcessRef | None = None
        self.memory_error: str | None = None
        self.decisions: list[Decision] = []
        self.spawns: list[act.Spawn] = []
        self.facts: list[Fact] = []
        self.states: list[tuple[float, str]] = []
        self.gate_open_for: int | None = None
        self.living: int | None = None
        self.outcome = Outcome()
        self.exit: int | None = None
        self.given_up: act.GiveUp | None = None
        self.proven: list[Levers] = []
        self.forced: list[int] = []
        self.cleaned: list[int] = []
        self.on_sample: Callable[[World], None] = lambda world: None
        self.send(
            0, DaemonStarted(at_ns=0, boot_id="b", next_launch=1, next_decision=1, last_known_good=last_known_good)
        )

    # --- the queue ---

    def send(self, delay_s: float, fact: Fact) -> None:
        self.serial += 1
        at = self.now + int(delay_s * SECOND)
        heapq.heappush(self.queue, (at, self.serial, replace(fact, at_ns=at)))

    def command(self, verb: Verb, delay_s: float = 0.0) -> None:
        self.send(delay_s, Commanded(at_ns=0, verb=verb, by="test"))

    def elapsed(self) -> float:
        return (self.now - self.began) / SECOND

    def devices(self) -> tuple[DeviceMemory, ...]:
        if self.memory_error:
            return ()
        holders = (ProcessRef(2712, "ada", "python", self.foreign),) if self.foreign else ()
        free = TOTAL - self.foreign - self.own
        return (DeviceMemory("GPU-0", TOTAL, free, round(0.6 * GIB), self.own, holders),)

    def run(self, seconds: float = 3600.0, until: Callable[[World], bool] = lambda world: False) -> World:
        """Until the time is over, the daemon exits, nothing can happen any more, or the condition holds."""
        end = self.now + int(seconds * SECOND)
        while self.exit is None and not until(self):
            wake = wake_at_ns(self.policy, self.state)
            upcoming = self.queue[0][0] if self.queue else None
            times = [t for t in (wake, upcoming) if t is not None]
            if not times or min(times) > end:
                self.now = max(self.now, end) if times else self.now
                break
            if wake is not None and (upcoming is None or wake < upcoming):
                self.now = max(self.now, wake)
                before = self.state
                self.step(Tick(at_ns=self.now))
                due = wake_at_ns(self.policy, self.state)
                assert due is None or due > self.now or self.state != before, "a timer that is due must do something"
            else:
                self.now, _, fact = heapq.heappop(self.queue)
                self.step(fact)
        return self

    def step(self, fact: Fact) -> None:
        if isinstance(fact, Exited):
            if self.living != fact.launch:
                return
            self.living, self.own = None, 0
        self.facts.append(fact)
        before = self.state.name
        self.state, actions = decide(self.policy, self.state, fact)
        if self.state.name is not before:
            self.states.append((self.elapsed(), self.state.name.value))
        for action in actions:
            self.carry_out(action)
        if isinstance(fact, GateSampled) and self.gate_open_for == fact.launch:
            self.sample_gate(0.5)

    # --- the shell ---

    def sample_gate(self, delay_s: float) -> None:
        self.on_sample(self)
        self.send(
            delay_s,
            GateSampled(
                at_ns=0,
                launch=self.gate_open_for or 0,
                devices=self.devices(),
                memory_error=self.memory_error,
                port_owner=self.port_owner,
            ),
        )

    def carry_out(self, action: act.Action) -> None:
        match action:
            case act.Decide(decision):
                self.decisions.append(decision)
            case act.Reap():
                self.send(0.1, LeftoversReaped(at_ns=0))
            case act.WatchGate(launch):
                self.gate_open_for = launch
                self.sample_gate(0.0)
            case act.CloseGate():
                self.gate_open_for = None
            case act.Spawn(launch, _):
                self.spawn(action)
                assert self.living == (None if self.outcome.unexecuted else launch)
            case act.Canary() | act.Burst() | act.Weigh():
                self.prove(action)
            case act.Stop(launch, _):
                self.send(0.9, Exited(at_ns=0, launch=launch, signal=15))
                self.send(1.0, Diagnosed(at_ns=0, launch=launch, diagnosis=Diagnosis(Kind.NONE)))
                self.send(1.1, TreeEnded(at_ns=0, launch=launch))
            case act.EndTree(launch):
                verdict = self.outcome.diagnosis or Diagnosis(Kind.NONE)
                after = self.devices()
                self.send(0.05, Diagnosed(at_ns=0, launch=launch, diagnosis=verdict, devices=self.dying, after=after))
                self.send(0.1, TreeEnded(at_ns=0, launch=launch))
            case act.Force(launch):
                self.forced.append(launch)
            case act.Clean(launch):
                self.send(0.01, Cleaned(at_ns=0, moved=("/tmp/lock",)))
                self.cleaned.append(launch)
            case act.Proven(_, target):
                self.proven.append(target)
            case act.GiveUp():
                self.given_up = action
            case act.Exit(code):
                self.exit = code
            case _:
                raise AssertionError(action)

    def prove(self, action: act.Canary | act.Burst | act.Weigh) -> None:
        launch, outcome = action.launch, self.outcome
        if isinstance(action, act.Weigh):
            self.send(0.1, SoakDone(at_ns=0, launch=launch, devices=self.soak()))
        elif isinstance(action, act.Burst):
            self.burst(launch, action.requests)
        elif outcome.dies_in == "canary":
            self.send(0.5, Exited(at_ns=0, launch=launch, code=outcome.code))
        else:
            ok, status = outcome.canary, outcome.canary_status
            self.send(0.2, CanaryDone(at_ns=0, launch=launch, ok=ok, detail="no byte in 30 s", status=status))

    def burst(self, launch: int, requests: int) -> None:
        outcome = self.outcome
        failed = max(1, requests // 2) if outcome.dies_in == "burst" else outcome.burst_failed
        done = BurstDone(
            at_ns=0,
            launch=launch,
            ok=not failed and not outcome.burst_silent,
            requests=requests,
            answered=requests - failed,
            failed=failed,
            seconds=300.0 if outcome.burst_silent else 1.0,
            silent=outcome.burst_silent,
            detail="500 EngineCore encountered an issue" if failed else "",
        )
        self.send(done.seconds, done)
        if outcome.dies_in == "burst":
            self.send(done.seconds + 0.5, Exited(at_ns=0, launch=launch, code=outcome.code))

    def soak(self) -> tuple[DeviceSoak, ...]:
        (before,) = self.devices()
        self.own += self.outcome.soak_takes
        (after,) = self.devices()
        return (
            DeviceSoak(
                after.device,
                after.total_bytes,
                after.context_bytes,
                before.own_bytes,
                after.own_bytes,
                after.own_bytes,
                before.free_bytes,
                after.free_bytes,
                samples=15,
            ),
        )

    def spawn(self, action: act.Spawn) -> None:
        assert self.living is None, "two engines at once"
        assert self.gate_open_for == action.launch, "spawned without a gate"
        self.living, self.gate_open_for = action.launch, None
        self.spawns.append(action)
        self.outcome = outcome = self.script(action, self)
        launch = action.launch
        if outcome.unexecuted is not None:
            self.living = None
            failed = SpawnFailed(at_ns=0, launch=launch, error=outcome.unexecuted, lasting=outcome.lasting)
            self.send(0.01, failed)
            return
        self.send(0.01, Spawned(at_ns=0, launch=launch, pid=4000 + launch, start_ticks=1, argv=("vllm",), log="l"))
        if outcome.numbers:
            self.send(1.0, LedgerSeen(at_ns=0, launch=launch, numbers=outcome.numbers))
        if outcome.healthy_s is not None:
            self.send(outcome.healthy_s, HealthSeen(at_ns=0, launch=launch, status=200))
        if outcome.fails_s is not None:
            self.send(outcome.fails_s, Exited(at_ns=0, launch=launch, code=outcome.code))
        util = action.levers.number("gpu_memory_utilization") or 900
        self.own = util * TOTAL // 1000
        self.own_of_launch = self.own

    @property
    def dying(self) -> tuple[DeviceMemory, ...]:
        """The last sample before the end: the engine still held its memory."""
        own, self.own = self.own, getattr(self, "own_of_launch", 0)
        try:
            return self.devices()
        finally:
            self.own = own
