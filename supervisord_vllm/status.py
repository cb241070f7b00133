"""The documents that an operator and a program read: ``status`` and ``history``, JSON, schema 1, stable names.

The daemon describes itself in a `Snapshot` of plain values; where none runs, the store is asked. Times are RFC 3339 in
UTC, levers are in their public form, sizes are bytes. New keys may be added under schema 1, none is removed or renamed.
Imports the standard library and the core only: ``status`` and ``explain`` start in no time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from supervisord_vllm.clock import SECOND_NS, Now, rfc3339
from supervisord_vllm.core import codec
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.facts import DeviceMemory, Hold
from supervisord_vllm.core.ledger import requested
from supervisord_vllm.core.levers import LEVERS, UTILIZATION, Levers, show, value_to_json
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, State, StateName, budget_left, outlook
from supervisord_vllm.engine.metrics import EngineLoad
from supervisord_vllm.lasting import HELD, hold_document
from supervisord_vllm.store.history import DecisionRecord, History, LaunchRecord

if TYPE_CHECKING:  # a client that reads the store needs no rules
    from supervisord_vllm.core.creep import Growth
    from supervisord_vllm.core.wayback import WayBack
    from supervisord_vllm.strain import Strained

SCHEMA = 1
NO_DAEMON = "no-daemon"
"""The state of an instance whose daemon does not run; whether an engine does is then nobody's knowledge."""

Document = dict[str, Any]

_ON = frozenset({StateName.STARTING, StateName.PROVING, StateName.SERVING, StateName.DRAINING, StateName.STOPPING})
"""States in which the current launch has a process."""


@dataclass(frozen=True)
class LaunchView:
    """The current launch, while it has a process. Times are CLOCK_BOOTTIME; ``argv`` is redacted already."""

    number: int
    levers: Levers
    argv: tuple[str, ...]
    pid: int | None
    started_ns: int
    log: str
    phase: str = ""


@dataclass(frozen=True)
class Snapshot:
    """One moment of the daemon. Times are CLOCK_BOOTTIME ns of this boot; ``now`` ties them to the wall clock.

    ``decision`` is the last of this run with what came of it; before there is one, ``earlier`` is the store's last.
    ``counters`` are losses by what was lost (``facts``, ``store_entries``, ``engine_lines``, ``log_lines``).
    """

    name: str
    now: Now
    state: str
    since_ns: int
    declared: Levers = field(default_factory=Levers)
    ceilings: Levers = field(default_factory=Levers)
    """How high each lever may stand at present (`core.ceilings`)."""
    ready: bool = False
    proven: bool = False
    held: bool = False
    hold: Hold | None = None
    act: bool = True
    given_up: str | None = None
    launch: LaunchView | None = None
    memory: tuple[DeviceMemory, ...] = ()
    memory_error: str | None = None
    memory_age_s: float | None = None
    load: EngineLoad | None = None
    strained: Strained | None = None
    proof: Document | None = None
    """Part and progress of the launch's proof (`proof_progress.document`)."""
    decision: Decision | None = None
    outcome: str | None = None
    earlier: DecisionRecord | None = None
    next_what: str = ""
    next_ns: int | None = None
    way_back: WayBack | None = None
    growth: Mapping[str, Growth] = field(default_factory=dict)
    """How the engine's own memory grows, by device, once that was watched for some hours."""
    budget_left: int = 0
    window_s: float = 0.0
    pid: int = 0
    version: str = ""
    daemon_since: float = 0.0
    """Wall time, in seconds, at which this daemon began: another one after an upgrade, though the pid stays."""
    counters: Mapping[str, int] = field(default_factory=dict)


def snapshot_of(policy: Policy, state: State, now: Now) -> Snapshot:
    """What the core's state says; the shell adds what only it knows with `dataclasses.replace`."""
    from supervisord_vllm.core.ceilings import ceilings  # only a daemon asks
    from supervisord_vllm.core.wayback import way_back

    launch = state.launch if state.name in _ON else None
    what, at_ns = outlook(policy, state)
    return Snapshot(
        name=policy.name,
        now=now,
        state=state.name.value,
        since_ns=state.since_ns,
        declared=policy.declared,
        ceilings=ceilings(policy, state),
        ready=state.ready,
        proven=launch is not None and launch.proven,
        held=state.held,
        hold=state.hold,
        way_back=way_back(policy, state, now.boottime_ns),
        act=policy.act,
        given_up=state.given_up,
        launch=None if launch is None else _view(launch),
        decision=state.last_decision,
        next_what=what,
        next_ns=at_ns,
        budget_left=budget_left(policy, state, now.boottime_ns),
        window_s=policy.window_ns / SECOND_NS,
    )


def _view(launch: Launch) -> LaunchView:
    return LaunchView(
        launch.number, launch.levers, launch.argv, launch.pid, launch.spawned_ns, launch.log, launch.phase
    )


def degraded_levers(declared: Levers, running: Levers) -> tuple[str, ...]:
    """The declared levers that run below what was asked for: lower numbers, graphs off, other weights or KV dtype."""
    found = []
    for name, wanted in declared.items():
        value = running.get(name)
        if value is None or value == wanted:
            continue
        numeric = LEVERS[name].kind in {"int", "per_mille"}
        if not numeric or running.number(name) < declared.number(name):  # type: ignore[operator]
            found.append(name)
    eager_added = running.eager and "enforce_eager" not in declared
    return (*found, "enforce_eager") if eager_added else tuple(found)


def why_not_ready(snapshot: Snapshot) -> str:
    """One line for ``/readyz``; empty when the engine is ready."""
    if snapshot.ready:
        return ""
    text = snapshot.given_up or snapshot.next_what
    return f"{snapshot.state}: {text}" if text else snapshot.state


def headline(snapshot: Snapshot) -> str:
    """One line for ``systemctl status``: the phase, the engine's levers, what is next or why nothing is."""
    launch = snapshot.launch
    state = snapshot.state
    if launch is not None:
        levers = ", ".join(f"{name} {show(name, value)}" for name, value in launch.levers.items())
        state = f"{state}, launch {launch.number} ({levers or 'vLLM defaults'})"
    part = snapshot.proof["part"] if snapshot.proof is not None else None
    if part is not None and snapshot.proof is not None and snapshot.state == StateName.PROVING.value:
        state = f"{state}, {part} {snapshot.proof[part]['percent']} %"
    coming = "" if snapshot.next_what.startswith("nothing") else snapshot.next_what
    return ": ".join(filter(None, (state, snapshot.given_up or coming)))


def status_document(snapshot: Snapshot) -> Document:
    """``status --json`` and ``/api/v1/status`` of a running daemon."""
    show_time = snapshot.now.show
    launch = snapshot.launch
    degraded = () if launch is None else degraded_levers(snapshot.declared, launch.levers)
    return {
        "schema": SCHEMA,
        "name": snapshot.name,
        "state": snapshot.state,
        "since": show_time(snapshot.since_ns),
        "ready": snapshot.ready,
        "proven": snapshot.proven,
        "held": snapshot.held,
        "hold": _hold(snapshot),
        "act": snapshot.act,
        "reason": why_not_ready(snapshot),
        "given_up": snapshot.given_up,
        "launch": None
        if launch is None
        else {
            "number": launch.number,
            "levers": launch.levers.to_json(),
            "argv": list(launch.argv),
            "pid": launch.pid,
            "started_at": show_time(launch.started_ns),
            "log": launch.log,
            "phase": launch.phase,
        },
        "declared": snapshot.declared.to_json(),
        "ceilings": snapshot.ceilings.to_json(),
        "degraded": bool(degraded),
        "degraded_levers": list(degraded),
        "way_back": _way_back(snapshot),
        "memory": [_device(device, launch, snapshot.growth.get(device.device)) for device in snapshot.memory],
        "memory_error": snapshot.memory_error,
        "memory_age_s": None if snapshot.memory_age_s is None else round(snapshot.memory_age_s, 1),
        "load": None if snapshot.load is None else snapshot.load.to_json(),
        "pressure": _pressure(snapshot.strained),
        "proof": snapshot.proof,
        "decision": _last_decision(snapshot),
        "next": {
            "what": snapshot.next_what,
            "at": None if snapshot.next_ns is None else show_time(snapshot.next_ns),
            "earliest": snapshot.state == StateName.SERVING.value,  # else a deadline
        },
        "budget": {"left": snapshot.budget_left, "window_s": snapshot.window_s},
        "daemon": {
            "pid": snapshot.pid,
            "version": snapshot.version,
            "since": rfc3339(snapshot.daemon_since),
            "counters": dict(snapshot.counters),
        },
    }


def status_from_history(name: str, history: History) -> Document:
    """``status --json`` where no daemon runs: the last launch and decision, and no claim about the present.

    Raises:
        StoreError: the store cannot be read.
    """
    launches = history.launches(limit=1)
    decision = history.last_decision()
    runs = history.runs()
    launch = launches[-1] if launches else None
    ended = [time for time in (launch and launch.ended_at, decision and decision.completed_at) if time]
    return {
        "schema": SCHEMA,
        "name": name,
        "state": NO_DAEMON,
        "since": max(ended, default=None),
        "ready": False,
        "proven": False,
        "held": (hold := hold_document(history.meta(HELD), time.time())) is not None,
        "hold": hold,
        "act": True,
        "reason": "no daemon runs",
        "given_up": None,
        "launch": None if launch is None else launch_document(launch),
        "declared": history.policy(runs[-1].run).declared.to_json() if runs else {},
        "ceilings": {},
        "degraded": False,
        "degraded_levers": [],
        "way_back": None,
        "memory": [],
        "memory_error": None,
        "memory_age_s": None,
        "load": None,
        "pressure": None,
        "proof": None,
        "decision": None if decision is None else recorded_decision_document(decision),
        "next": {"what": "nothing: no daemon runs", "at": None, "earliest": False},
        "budget": None,
        "daemon": None,
    }


def history_document(name: str, history: History, limit: int = 200) -> Document:
    """``history --json``: the last launches and decisions, the oldest first.

    Raises:
        StoreError: the store cannot be read.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "launches": [launch_document(launch) for launch in history.launches(limit)],
        "decisions": [recorded_decision_document(record) for record in history.decisions(limit)],
    }


def launch_document(launch: LaunchRecord) -> Document:
    """A recorded launch."""
    return {
        "number": launch.number,
        "levers": launch.levers,
        "argv": launch.argv,
        "pid": launch.pid,
        "started_at": launch.started_at,
        "log": launch.log,
        "ready_at": launch.ready_at,
        "proven_at": launch.proven_at,
        "ended_at": launch.ended_at,
        "exit_code": launch.exit_code,
        "exit_signal": launch.exit_signal,
        "outcome": launch.outcome,
    }


def decision_document(decision: Decision, at: str, outcome: str | None) -> Document:
    """A decision of this run; ``at`` in wall time."""
    return _decision(codec.to_json(decision), at, outcome)


def recorded_decision_document(record: DecisionRecord) -> Document:
    """A decision from the store, whatever version wrote it."""
    document = _decision(record.json, record.at, record.outcome)
    return {**document, "completed_at": record.completed_at, "unrecorded": record.unrecorded}


def show_lever(name: str, public: object) -> str:
    """A lever's public value as a person reads it: ``0.900``, ``8,192``, ``on``; the unknown as it is."""
    if public is None:
        return "vLLM's default"
    try:
        value = codec.from_json(Levers, {name: public}).get(name)
    except ValueError:
        value = None
    return str(public) if value is None else show(name, value)


def _last_decision(snapshot: Snapshot) -> Document | None:
    decision = snapshot.decision
    if decision is not None:
        return decision_document(decision, snapshot.now.show(decision.at_ns), snapshot.outcome)
    return None if snapshot.earlier is None else recorded_decision_document(snapshot.earlier)


def _decision(json: Mapping[str, Any], at: str, outcome: str | None) -> Document:
    return {
        "number": json.get("number"),
        "at": at,
        "launch": json.get("launch"),
        "kind": json.get("kind"),
        "action": json.get("action"),
        "moves": json.get("moves") or [],
        "target": json.get("target"),
        "evidence": json.get("evidence") or [],
        "arithmetic": json.get("arithmetic") or "",
        "skipped": json.get("skipped") or [],
        "sentence": json.get("sentence") or "",
        "acted": json.get("acted", True),
        "outcome": outcome,
    }


def _pressure(strained: Strained | None) -> Document | None:
    """How slow the engine is against its targets, and what that has cost of what a restart would."""
    if strained is None:
        return None
    targets = strained.targets
    named = (("ttft_p95_s", targets.ttft_ns), ("inter_token_p95_s", targets.inter_token_ns))
    return {
        "targets": {
            name: None if ns is None else ns / SECOND_NS for name, ns in (*named, ("queue_p95_s", targets.queue_ns))
        },
        "origin": strained.origin,
        "verdict": strained.verdict,
        "curable": strained.curable,
        "loss": round(strained.loss, 3),
        "lost_s": round(strained.lost_s, 1),
        "worth_s": round(strained.worth_s, 1),
        "engines_needed": None if strained.engines is None else round(strained.engines, 1),
        "judging": strained.judging,
        "missed_pages": strained.missed,
    }


def _hold(snapshot: Snapshot) -> Document | None:
    hold, show_time = snapshot.hold, snapshot.now.show
    if hold is None:
        return None
    return {
        "by": hold.by or None,
        "reason": hold.reason or None,
        "since": show_time(hold.since_ns),
        "until": None if hold.until_ns is None else show_time(hold.until_ns),
    }


def _way_back(snapshot: Snapshot) -> Document | None:
    """Why the launch is below what is declared, lever by lever, and when that will be taken back."""
    back = snapshot.way_back
    if back is None:
        return None
    return {
        "levers": [
            {
                "lever": below.lever,
                "now": value_to_json(below.lever, below.now),
                "declared": value_to_json(below.lever, below.declared),
                "why": below.why,
                "climbs": below.climbs,
            }
            for below in back.levers
        ],
        "waits_for": back.waits_for,
        "at": None if back.at_ns is None else snapshot.now.show(back.at_ns),
    }


def _growth(growth: Growth | None) -> Document | None:
    if growth is None:
        return None
    return {
        "bytes_per_hour": growth.per_hour,
        "low": growth.low,
        "high": growth.high,
        "hours": round(growth.span_ns / (3600 * SECOND_NS), 1),
        "creeps": growth.creeps,
    }


def _device(device: DeviceMemory, launch: LaunchView | None, growth: Growth | None = None) -> Document:
    utilization = None if launch is None else launch.levers.number(UTILIZATION)
    return {
        "gpu": device.device,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "requested_bytes": None if utilization is None else requested(utilization, device.total_bytes),
        "own_bytes": device.own_bytes,
        "growth": _growth(growth),
        "holders": [
            {
                "pid": holder.pid,
                "user": holder.user,
                "command": holder.command,
                "memory_bytes": holder.memory_bytes,
                "ours": holder.ours,
            }
            for holder in device.holders
        ],
    }
