"""A recorded run as seconds by part: pure functions over the facts of the store, in their JSON form.

    fault → noticed → exit → gate opens to watch → spawn → healthy → ready

``noticed`` is the first fact by which the daemon could know: a fatal line, /health other than 200, or the exit. The
supervisor's own share of a recovery is exit → spawn (verdict, memory given back, gate) and healthy → ready (canary).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Json = dict[str, Any]
Named = tuple[str, Json]
"""A fact as the store has it: the name of its class and its fields."""


@dataclass
class Times:
    """When one launch reached what; CLOCK_BOOTTIME in ns, ``None`` for what it did not reach."""

    number: int
    watched: int | None = None
    opened: int | None = None
    spawned: int | None = None
    fatal: int | None = None
    healthy: int | None = None
    unhealthy: int | None = None
    ready: int | None = None
    exited: int | None = None
    diagnosed: int | None = None
    gone: int | None = None
    exit: str = ""
    kind: str = ""
    numbers: Mapping[str, Any] | None = None
    before: Sequence[Json] = ()
    after: Sequence[Json] = ()

    @property
    def noticed(self) -> int | None:
        """The first sign of the failure; ``None`` for a launch that did not fail."""
        if self.exited is None:
            return None
        return min(at for at in (self.fatal, self.unhealthy, self.exited) if at is not None)


def times(facts: Iterable[Named]) -> list[Times]:
    """Every launch of a run, in order."""
    found: dict[int, Times] = {}
    for name, fact in facts:
        number = fact.get("launch") or 0
        if number:
            _note(found.setdefault(number, Times(number)), name, fact)
    return [found[number] for number in sorted(found)]


def _note(one: Times, name: str, fact: Json) -> None:
    at = int(fact["at_ns"])
    if name == "GateSampled":
        one.watched = one.watched or at
        if one.spawned is None:
            one.opened, one.before = at, fact.get("devices") or ()
    elif name == "Spawned":
        one.spawned = at
    elif name == "FatalSeen":
        one.fatal = one.fatal or at
    elif name == "HealthSeen" and fact.get("status") == 200:
        one.healthy = one.healthy or at
    elif name == "HealthSeen":
        one.unhealthy = one.unhealthy or (at if one.healthy is not None else None)
    elif name == "CanaryDone" and fact.get("ok"):
        one.ready = one.ready or at
    elif name == "LedgerSeen":
        one.numbers = {**(one.numbers or {}), **fact.get("numbers", {})}
    elif name == "Exited":
        one.exited = at
        one.exit = str(fact["code"]) if fact.get("code") is not None else f"signal {fact.get('signal')}"
    elif name == "Diagnosed":
        one.diagnosed, one.kind, one.after = at, fact["diagnosis"]["kind"], fact.get("after") or ()
    elif name == "TreeEnded":
        one.gone = at


def seconds(begin: int | None, end: int | None) -> float | None:
    """Between two moments, in seconds to the hundredth."""
    return None if begin is None or end is None else round((end - begin) / 1e9, 2)


def parts(one: Times, before: Times | None, fault_ns: int | None) -> Json:
    """The parts of one launch; those up to the gate belong to the failure of the launch before it."""
    return {
        "fault_to_noticed": seconds(fault_ns, before.noticed) if before else None,
        "noticed_to_exit": seconds(before.noticed, before.exited) if before else None,
        "exit_to_gate": seconds(before.exited, one.watched) if before else None,
        "gate_to_spawn": seconds(one.watched, one.spawned),
        "spawn_to_healthy": seconds(one.spawned, one.healthy),
        "healthy_to_ready": seconds(one.healthy, one.ready),
        "spawn_to_exit": seconds(one.spawned, one.exited),
    }


def own_share(launches: Sequence[Times], patience_ns: int) -> Json:
    """Seconds of the supervisor's own in every recovery. A gate that was watched for the policy's patience waited for
    a neighbour: those recoveries are told apart."""
    waits = {one.number for one in launches if one.watched and one.spawned and one.spawned - one.watched >= patience_ns}
    pairs = list(pairwise(launches))
    return {
        "exit_to_spawn": [seconds(a.exited, b.spawned) for a, b in pairs if b.number not in waits and b.spawned],
        "exit_to_spawn_with_a_wait": [seconds(a.exited, b.spawned) for a, b in pairs if b.number in waits],
        "healthy_to_ready": [seconds(one.healthy, one.ready) for one in launches if one.ready],
    }


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known."""
    known = [value for value in values if value is not None]
    return round(median(known), 2) if known else None


def context_mib(one: Times) -> int | None:
    """What the engine took before it looked at free memory (MiB): sampled at the gate less what vLLM printed."""
    printed = (one.numbers or {}).get("free_gib")
    if not isinstance(printed, (int, float)) or len(one.before) != 1:
        return None
    return round(int(one.before[0]["free_bytes"]) / (1 << 20) - printed * 1024)


def memory_after(one: Times) -> list[Json]:
    """Free and foreign bytes of every device once the launch was gone."""
    return [
        {
            "device": device["device"],
            "free_bytes": device["free_bytes"],
            "total_bytes": device["total_bytes"],
            "holders": [{"pid": h["pid"], "bytes": h["memory_bytes"], "ours": h["ours"]} for h in device["holders"]],
        }
        for device in one.after
    ]
