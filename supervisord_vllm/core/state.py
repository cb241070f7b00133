"""The state: everything the daemon knows that can change a decision, as frozen values, and the timers it asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from supervisord_vllm.core import proof
from supervisord_vllm.core.case import Case
from supervisord_vllm.core.creep import Growth
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Kind, Number
from supervisord_vllm.core.facts import BurstDone, DeviceMemory, Exited, Hold, KernelSeen, Phase, SoakDone, Verdict
from supervisord_vllm.core.ledger import Ledger, Room
from supervisord_vllm.core.levers import EAGER, KV_DTYPE, MODEL_LEN, UTILIZATION, WEIGHTS, Levers
from supervisord_vllm.core.observations import Observation
from supervisord_vllm.core.occasion import DAY_NS, Occasion, occasion
from supervisord_vllm.core.policy import SECOND, Policy

FATAL_PATIENCE_NS = 6 * SECOND
"""An engine that said it is dying and still lives is stopped after this long."""
UNHEALTHY_PATIENCE_NS = 10 * SECOND
"""/health other than 200 for longer is a failure: an engine's death shows 503 for 5 s at most, then it exits."""


class StateName(str, Enum):
    """The states; the value is the public name."""

    ADOPTING = "adopting"
    STOPPED = "stopped"
    GATING = "gating"
    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKING_OFF = "backing-off"
    GIVEN_UP = "given-up"


Environment = tuple[tuple[str, str], ...]
"""Variables that one remedy gives to the engine, sorted by name."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A planned launch that tries another configuration: where it goes back to if it fails, and what it is for."""

    back: Levers
    why: Literal["step-up", "pressure", "operator"]
    verdict: Verdict | None = None


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
    fatal_asked: bool = False
    unhealthy_ns: int | None = None
    exited: Exited | None = None
    first_token_s: float | None = None
    """What the first canary's first token took, where that was told."""
    burst: BurstDone | None = None
    weighed: bool = False
    """The soak's time is over and its memory was asked for."""
    soak: SoakDone | None = None
    kernel: tuple[KernelSeen, ...] = ()
    oom_kills: int = 0
    vanished: str | None = None
    environment: Environment = ()
    serving_ns: int | None = None
    load: Literal["idle", "busy"] | None = None
    room: Room | None = None
    probe: Probe | None = None
    proposed: bool = False
    """A step up was decided, or said where nothing is acted on: not again for this launch, unless the room changes."""
    after_ns: int = 0
    """No step up before: none was possible, or its window was missed."""
    awaited: bool = False
    """It was said that the quiet moment for a step up does not come."""
    growth: Growth | None = None
    """Own memory that creeps."""
    growth_told: bool = False
    recycle_after_ns: int = 0
    """No recycle before: its window was missed."""
    fingerprint: str = ""
    """Of the policy that it was started under."""
    start_ticks: int = 0
    """With the pid the identity of the main process within this boot."""
    cut: int | None = None
    """How many bytes of output there were when our first signal was sent."""
    told: bool = False
    """It was said that no configuration helps against the load."""


@dataclass(frozen=True)
class Incident:
    """What was learnt between the first failure and the next proof."""

    launches: int = 0
    signatures: tuple[str, ...] = ()
    barred: frozenset[str] = frozenset()
    moved: tuple[Move, ...] = ()
    cause: Case | None = None
    cleaned: bool = False


@dataclass(frozen=True)
class Opening:
    """The gate while it is watched: since when, since when memory is short, and the samples of the window."""

    since_ns: int
    short_since_ns: int | None = None
    unread_since_ns: int | None = None
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
    environment: Environment = ()
    probe: Probe | None = None


@dataclass(frozen=True)
class Draining:
    """Why the engine takes no new requests: then the plan is carried out, or it stays stopped."""

    since_ns: int
    plan: Plan | None = None
    why: Literal["planned", "operator"] = "planned"
    counted: bool = False
    """Whether it is the last of `State.planned`."""


@dataclass(frozen=True)
class Ending:
    """Why the tree is being ended and what is already known of it; ``suspected`` is a failure seen without an exit,
    ``forced`` says that an operator asked twice, so that it is killed instead of waited for."""

    why: Literal["failure", "operator", "shutdown", "planned"]
    since_ns: int
    suspected: Kind | None = None
    suspicion: str = ""
    plan: Plan | None = None
    gone: bool = False
    forced: bool = False
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Numbers of what was suspected, under their canonical names."""


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
    hold: Hold | None = None
    next_launch: int = 1
    next_decision: int = 1
    last_decision: Decision | None = None
    given_up: str | None = None
    contexts: Mapping[str, int] = field(default_factory=dict)
    graphs: int = 0
    """CUDA graphs that vLLM captured beyond what it requested, in bytes, as last printed."""
    memory_error: str | None = None
    dropped: int = 0
    observations: tuple[Observation, ...] = ()
    wall_offset_s: int = 0
    """Wall time minus CLOCK_BOOTTIME, in seconds, as last seen."""
    utc_offset_s: int = 0
    """Local time of the host minus UTC, in seconds, as last seen."""
    fingerprint: str = ""
    """Of the policy that ``target`` was made under."""
    good: Levers | None = None
    """The last target that passed the proof under this policy."""
    draining: Draining | None = None
    environment: Environment = ()
    """What the next launch gets beyond the policy's own variables."""
    probe: Probe | None = None
    """Set while the next launch is a planned change."""
    planned: tuple[int, ...] = ()
    """When the planned restarts of the last 24 h were, the oldest first."""
    failed_climbs: int = 0
    roll_backs: Mapping[str, int] = field(default_factory=dict)
    """Changes against pressure that were taken back, by verdict, since the last that was kept."""
    recurring: tuple[tuple[str, int], ...] = ()
    """Signatures of the failures of the window, with their times: also across proofs."""

    @classmethod
    def initial(cls) -> State:
        """The state of a daemon that has seen no fact yet."""
        return cls()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self.launch is not None and self.launch.ready and self.name in (StateName.PROVING, StateName.SERVING)

    @property
    def held(self) -> bool:
        """Whether an operator holds the configuration; a hold that is over is taken away by the next fact."""
        return self.hold is not None

    def wall_s(self, at_ns: int) -> int:
        """Wall time of a moment, in whole seconds."""
        return at_ns // SECOND + self.wall_offset_s


def recent_plans(state: State, now_ns: int) -> tuple[int, ...]:
    """When the planned restarts of the last 24 h were, the oldest first."""
    return tuple(at for at in state.planned if at > now_ns - DAY_NS)


def climb_due_ns(policy: Policy, state: State) -> int | None:
    """When the way back up may be tried next, or it is said that its quiet moment does not come; ``None`` where it
    waits for something else than time."""
    comes, launch = climb_occasion(policy, state), state.launch
    if comes is None or launch is None or launch.serving_ns is None:
        return None
    if comes.at_ns is None and not launch.awaited and not state.held and policy.planned_per_day:
        return max(climb_from_ns(policy, state, launch.serving_ns) + DAY_NS, launch.after_ns)
    return comes.at_ns


def climb_occasion(policy: Policy, state: State) -> Occasion | None:
    """When the way back up may be tried next and what it waits for; ``None`` where nothing is to be taken back."""
    launch = state.launch
    if launch is None or launch.serving_ns is None or launch.proposed or not degraded(policy, launch):
        return None
    return occasion(policy, state, max(climb_from_ns(policy, state, launch.serving_ns), launch.after_ns))


def climb_from_ns(policy: Policy, state: State, serving_ns: int) -> int:
    """When a launch that serves since then has served for long enough: twice as long after each step up that failed."""
    return serving_ns + (policy.step_up_ns << min(state.failed_climbs, 16))


RECYCLE_HORIZON_NS = 36 * 3600 * SECOND
"""Memory that creeps is acted on once it would be full within this: a window a day comes in time."""


def recycles(policy: Policy) -> bool:
    """Whether an engine whose memory creeps is restarted by itself."""
    return policy.act and "planned-recycle" in policy.allow


def creep_due_ns(policy: Policy, state: State) -> int | None:
    """When memory that creeps is acted on, or said to; ``None`` where that is not a matter of time."""
    launch = state.launch
    if launch is None or launch.growth is None:
        return None
    due = max(launch.growth.full_ns - RECYCLE_HORIZON_NS, launch.growth.at_ns)
    if not launch.growth_told:
        return due
    return occasion(policy, state, max(due, launch.recycle_after_ns)).at_ns if recycles(policy) else None


def degraded(policy: Policy, launch: Launch) -> tuple[str, ...]:
    """Levers on the way back up: those whose step changed what the service can do, and a utilization that a
    neighbour lowered and that fits again. A smaller pool or fewer slots are left alone unless pressure says so."""
    below = tuple(
        name
        for name in (WEIGHTS, MODEL_LEN, EAGER, KV_DTYPE)
        if policy.rung(name) is not None and _lowered(name, launch.target.get(name), policy.declared.get(name))
    )
    wanted, now = launch.target.number(UTILIZATION), launch.levers.number(UTILIZATION)
    if wanted is not None and now is not None and now < wanted and launch.room and launch.room.fits >= wanted:
        below = (*below, UTILIZATION)
    return below


def _lowered(name: str, now: object, declared: object) -> bool:
    if now is None or (declared is None and name != EAGER):
        return False
    if name == EAGER:
        return bool(now) and not declared
    if isinstance(now, int) and isinstance(declared, int):
        return now < declared
    return now != declared


def wake_at_ns(policy: Policy, state: State) -> int | None:
    """When the shell must send a `Tick`, if no other fact comes first (CLOCK_BOOTTIME); ``None``: not at all."""
    times: list[int] = []
    launch = state.launch
    if state.name is StateName.BACKING_OFF and state.resume_ns is not None:
        times.append(state.resume_ns)
    if state.name is StateName.GATING and state.gate is not None:
        times.append(state.gate.since_ns + policy.gate.deadline_ns)
    if state.name is StateName.STOPPING and state.ending is not None:
        times.append(state.ending.since_ns + policy.stop_deadline_ns)
    if state.name is StateName.DRAINING and state.draining is not None:
        times.append(state.draining.since_ns + policy.drain_ns)
    if state.hold is not None and state.hold.until_ns is not None:
        times.append(state.hold.until_ns)
    if state.name is StateName.SERVING:
        times += (due for due in (climb_due_ns(policy, state), creep_due_ns(policy, state)) if due is not None)
    if launch is not None and state.name in (StateName.STARTING, StateName.PROVING, StateName.SERVING):
        if state.name is StateName.STARTING:
            times.append(launch.spawned_ns + policy.start_max_ns)
        if state.name is StateName.PROVING and (wake := proof.next_wake_ns(policy, launch)) is not None:
            times.append(wake)
        if launch.fatal_ns is not None and not launch.fatal_asked:
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


def _planned_outlook(policy: Policy, state: State) -> tuple[str, int | None]:
    """The planned change that a serving engine waits for, and its earliest moment."""
    launch, found = state.launch, []
    if (comes := climb_occasion(policy, state)) is not None:
        found.append(("a step up", comes))
    if launch is not None and launch.growth is not None and recycles(policy):
        due = max(launch.growth.full_ns - RECYCLE_HORIZON_NS, launch.growth.at_ns, launch.recycle_after_ns)
        found.append(("a restart with the same configuration, since its memory grows", occasion(policy, state, due)))
    if not found:
        return "nothing: it serves", None
    what, comes = min(found, key=lambda one: (one[1].at_ns is None, one[1].at_ns or 0))
    quiet = "" if policy.windows else ", at a quiet moment"
    return what + (f", {comes.waits_for}" if comes.waits_for else quiet), comes.at_ns


def outlook(policy: Policy, state: State) -> tuple[str, int | None]:
    """What will happen next by itself, and when (CLOCK_BOOTTIME ns; ``None`` where no time is fixed)."""
    if state.name is StateName.ADOPTING:
        wish = state.ending.why if state.ending is not None else ""
        then = {"shutdown": "exit", "operator": "stay stopped"}.get(wish, "open the gate")
        return f"end what an earlier launch left, then {then}", None
    if state.name is StateName.GATING and state.gate is not None:
        what = f"launch {state.next_launch} once the gate opens"
        waits = f" ({state.gate.waits_for})" if state.gate.waits_for else ""
        return what + waits, state.gate.since_ns + policy.gate.deadline_ns
    if state.name is StateName.STARTING and state.launch is not None:
        return "a canary once /health says 200", state.launch.spawned_ns + policy.start_max_ns
    if state.name is StateName.PROVING and state.launch is not None:
        return proof.coming(policy, state.launch)
    if state.name is StateName.SERVING:
        return _planned_outlook(policy, state)
    if state.name is StateName.DRAINING and state.draining is not None:
        then = "another configuration" if state.draining.why == "planned" else "stay stopped"
        return f"{then}, once no request is left", state.draining.since_ns + policy.drain_ns
    if state.name is StateName.STOPPING and state.ending is not None:
        leads = {
            "failure": "judge the failure, then act on it",
            "operator": "stay stopped",
            "shutdown": "exit",
            "planned": "start with the new configuration",
        }
        return leads[state.ending.why], state.ending.since_ns + policy.stop_deadline_ns
    if state.name is StateName.BACKING_OFF:
        return f"launch {state.next_launch} after the back-off", state.resume_ns
    if state.name is StateName.GIVEN_UP:
        return "nothing automatic: `vllm-supervise start` begins afresh", None
    return "nothing: `vllm-supervise start` starts the engine", None
