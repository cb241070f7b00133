"""The state: everything the daemon knows that can change a decision, as frozen values, and the timers it asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from supervisord_vllm.core.case import Bracket, Case
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.facts import DeviceMemory, Exited, Phase
from supervisord_vllm.core.ledger import Ledger
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import SECOND, Policy

FATAL_PATIENCE_NS = 6 * SECOND
"""An engine that said it is dying and still lives is stopped after this long."""
UNHEALTHY_PATIENCE_NS = 10 * SECOND
"""/health other than 200 for longer is a failure: an engine's death shows 503 for 5 s at most, then it exits."""
STOP_DEADLINE_NS = 180 * SECOND
"""Longer than the longest stop: whatever still lives then cannot be ended."""


class StateName(str, Enum):
    """The states; the value is the public name."""

    ADOPTING = "adopting"
    STOPPED = "stopped"
    GATING = "gating"
    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    STOPPING = "stopping"
    BACKING_OFF = "backing-off"
    GIVEN_UP = "given-up"


@dataclass(frozen=True)
class Launch:
    """One start of the engine. ``target`` is what was asked for before a neighbour lowered it to ``levers``."""

    number: int
    levers: Levers
    target: Levers
    spawned_ns: int
    gate_devices: tuple[DeviceMemory, ...] = ()
    pid: int | None = None
    argv: tuple[str, ...] = ()
    log: str = ""
    phase: Phase = "importing"
    ledger: Ledger = field(default_factory=lambda: Ledger({}))
    healthy_ns: int | None = None
    ready_ns: int | None = None
    ready: bool = False
    proven: bool = False
    fatal_ns: int | None = None
    unhealthy_ns: int | None = None
    exited: Exited | None = None


@dataclass(frozen=True)
class Incident:
    """What was learnt between the first failure and the next proof."""

    launches: int = 0
    signatures: tuple[str, ...] = ()
    bracket: Bracket = field(default_factory=Bracket)
    barred: frozenset[str] = frozenset()
    moved: tuple[Move, ...] = ()
    cause: Case | None = None


@dataclass(frozen=True)
class Opening:
    """The gate while it is watched: since when, since when memory is short, and the samples of the window."""

    since_ns: int
    short_since_ns: int | None = None
    samples: tuple[tuple[int, tuple[DeviceMemory, ...]], ...] = ()
    waits_for: str = ""
    port_taken: bool = False


@dataclass(frozen=True)
class Plan:
    """Where a failed launch leads once its tree is gone."""

    to: StateName
    target: Levers
    delay_ns: int = 0
    text: str = ""
    exhausted_until_ns: int | None = None


@dataclass(frozen=True)
class Ending:
    """Why the tree is being ended and what is already known of it; ``suspected`` is a failure seen without an exit."""

    why: Literal["failure", "operator", "shutdown"]
    since_ns: int
    suspected: Kind | None = None
    suspicion: str = ""
    plan: Plan | None = None
    gone: bool = False


@dataclass(frozen=True)
class State:
    """Everything the daemon knows that can change a decision. ``target`` is what the next launch asks for."""

    name: StateName = StateName.ADOPTING
    since_ns: int = 0
    target: Levers = field(default_factory=Levers)
    launch: Launch | None = None
    gate: Opening | None = None
    ending: Ending | None = None
    resume_ns: int | None = None
    incident: Incident = Incident()
    restarts: tuple[int, ...] = ()
    failures: int = 0
    held: bool = False
    next_launch: int = 1
    next_decision: int = 1
    last_decision: Decision | None = None
    given_up: str | None = None
    contexts: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0

    @classmethod
    def initial(cls) -> State:
        """The state of a daemon that has seen no fact yet."""
        return cls()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self.launch is not None and self.launch.ready and self.name in (StateName.PROVING, StateName.SERVING)


def wake_at_ns(policy: Policy, state: State) -> int | None:
    """When the shell must send a `Tick`, if no other fact comes first (CLOCK_BOOTTIME); ``None``: not at all."""
    times: list[int] = []
    launch = state.launch
    if state.name is StateName.BACKING_OFF and state.resume_ns is not None:
        times.append(state.resume_ns)
    if state.name is StateName.GATING and state.gate is not None:
        times.append(state.gate.since_ns + policy.gate.deadline_ns)
    if state.name is StateName.STOPPING and state.ending is not None:
        times.append(state.ending.since_ns + STOP_DEADLINE_NS)
    if launch is not None and state.name in (StateName.STARTING, StateName.PROVING, StateName.SERVING):
        if state.name is StateName.STARTING:
            times.append(launch.spawned_ns + policy.start_max_ns)
        if state.name is StateName.PROVING and launch.ready_ns is not None:
            times.append(launch.ready_ns + policy.soak_ns)
        if launch.fatal_ns is not None:
            times.append(launch.fatal_ns + FATAL_PATIENCE_NS)
        if launch.unhealthy_ns is not None:
            times.append(launch.unhealthy_ns + UNHEALTHY_PATIENCE_NS)
    return min(times, default=None)


def budget_left(policy: Policy, state: State, now_ns: int) -> int:
    """Same-again restarts left in the window."""
    return max(0, policy.budget - len(recent_restarts(policy, state, now_ns)))


def recent_restarts(policy: Policy, state: State, now_ns: int) -> tuple[int, ...]:
    """When the same-again restarts of the window were, the oldest first."""
    return tuple(at for at in state.restarts if at > now_ns - policy.window_ns)


def backoff_ns(policy: Policy, failures: int, launch: int) -> int:
    """Delay before the next same-again restart: growing, capped, jittered by at most 10 % (hash of the launch)."""
    rule = policy.backoff
    grown = rule.max_ns if failures > 64 else min(rule.max_ns, int(rule.first_ns * rule.factor**failures))
    jitter = int.from_bytes(hashlib.sha256(str(launch).encode()).digest()[:2], "big") / 0xFFFF
    return int(grown * (0.9 + 0.1 * jitter))


def outlook(policy: Policy, state: State) -> tuple[str, int | None]:
    """What will happen next by itself, and when (CLOCK_BOOTTIME ns; ``None`` where no time is fixed)."""
    if state.name is StateName.ADOPTING:
        return "end what an earlier launch left, then open the gate", None
    if state.name is StateName.GATING and state.gate is not None:
        what = f"launch {state.next_launch} once the gate opens"
        waits = f" ({state.gate.waits_for})" if state.gate.waits_for else ""
        return what + waits, state.gate.since_ns + policy.gate.deadline_ns
    if state.name is StateName.STARTING and state.launch is not None:
        return "a canary once /health says 200", state.launch.spawned_ns + policy.start_max_ns
    if state.name is StateName.PROVING and state.launch is not None:
        if state.launch.ready_ns is None:
            return "the canary's answer", None
        return "proven when the soak is over", state.launch.ready_ns + policy.soak_ns
    if state.name is StateName.SERVING:
        return "nothing: it serves", None
    if state.name is StateName.STOPPING and state.ending is not None:
        leads = {"failure": "judge the failure, then act on it", "operator": "stay stopped", "shutdown": "exit"}
        return leads[state.ending.why], state.ending.since_ns + STOP_DEADLINE_NS
    if state.name is StateName.BACKING_OFF:
        return f"launch {state.next_launch} after the back-off", state.resume_ns
    if state.name is StateName.GIVEN_UP:
        return "nothing automatic: `vllm-supervise start` begins afresh", None
    return "nothing: `vllm-supervise start` starts the engine", None
