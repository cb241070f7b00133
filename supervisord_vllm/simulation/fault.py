"""Faults on demand: what goes wrong, in which launch and at which stage.

A fault is a ``[[fault]]`` table of a card file or an entry of the variable ``SIMULATED_FAULTS``, written in one line:
``"oom at=running after-requests=3 launch=2; hang at=running launch=4"``.

Keys: ``kind``; ``launch`` a number or a list (without: every launch; launches are counted in the card's state file);
``at`` a stage of `STAGES`; ``after-requests``, ``at-once`` and ``after`` only with ``at = "running"`` (the nth request
that is admitted, so many requests in the engine at once, or a time since the engine is ready; without all of them: the
first request, in virtual time a minute after the engine is ready); ``bytes`` and ``for`` for the neighbour faults,
``bytes`` also what an ``oom`` tries to allocate; ``factor`` for ``slow-start``; ``code`` for ``exit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from supervisord_vllm.simulation.quantity import read_duration, read_size

STAGES = ("importing", "loading", "profiling", "kv-alloc", "capture", "warm-up", "running")
"""Stages in the order of a start; ``importing`` is the API server's, the others are EngineCore's."""

VARIABLE = "SIMULATED_FAULTS"

_CORE_STAGES = STAGES[1:]
KINDS: Mapping[str, tuple[str, ...]] = {
    "oom": _CORE_STAGES,
    "die": _CORE_STAGES,
    "exit": STAGES,
    "hang": STAGES,
    "unknown": _CORE_STAGES,
    "missing-model": (),
    "slow-start": (),
    "swallow-term": (),
    "ignore-term": (),
    "term-hang": (),
    "neighbour-takes": STAGES,
    "await-neighbour": STAGES,
}
"""Kinds and the stages where each may strike."""

_DEFAULT_STAGE = {"neighbour-takes": "importing", "await-neighbour": "importing"}
_KEYS = ("kind", "launch", "at", "after-requests", "at-once", "after", "bytes", "for", "factor", "code")


class FaultError(ValueError):
    """A fault is written wrongly; one line that names the place and the fix."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; see the module for the meaning of the fields. Sizes are bytes, times seconds."""

    kind: str
    launches: tuple[int, ...] = ()
    at: str = ""
    after_requests: int = 1
    after: float | None = None
    bytes: int | None = None
    seconds: float | None = None
    factor: float = 10.0
    code: int = 0
    counted: bool = False
    """Whether ``after-requests`` was written."""
    at_once: int | None = None

    def applies(self, launch: int) -> bool:
        """Whether the fault belongs to this launch."""
        return not self.launches or launch in self.launches


def fault_from(entry: object, where: str) -> Fault:
    """Build one fault from a TOML table; the default stage is ``running`` (neighbour faults: ``importing``).

    Raises:
        FaultError: an unknown key, kind or stage, or a value of the wrong form.
    """
    if not isinstance(entry, Mapping):
        raise FaultError(f"{where} must be a table")
    for key in entry:
        if key not in _KEYS:
            raise FaultError(f"{where} unknown key {key!r}; known are {', '.join(_KEYS)}")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FaultError(f"{where} kind {kind!r} is unknown; known are {', '.join(KINDS)}")
    stages = KINDS[kind]
    at = entry.get("at", _DEFAULT_STAGE.get(kind, "running") if stages else "")
    if at not in stages and (stages or at != ""):
        known = ", ".join(stages) if stages else "none"
        raise FaultError(f"{where} at = {at!r} is no stage for {kind!r}; known are {known}")
    if at != "running" and entry.keys() & {"after-requests", "at-once", "after"}:
        raise FaultError(f'{where} after-requests, at-once and after need at = "running"')
    launch = entry.get("launch", [])
    launches = launch if isinstance(launch, list) else [launch]
    if not all(_whole(number, 1) for number in launches):
        raise FaultError(f"{where} launch: a number from 1 or a list of them is wanted, found {launch!r}")
    size, after, seconds = entry.get("bytes"), entry.get("after"), entry.get("for")
    for key, value, read in (
        ("bytes", size, read_size),
        ("after", after, read_duration),
        ("for", seconds, read_duration),
    ):
        if value is not None and (not isinstance(value, str) or read(value) is None):
            raise FaultError(f'{where} {key}: a string such as "{"40GiB" if key == "bytes" else "20s"}" is wanted')
    if kind in ("neighbour-takes", "await-neighbour") and size is None:
        raise FaultError(f'{where} {kind} needs bytes, such as bytes = "40GiB"')
    requests, code, factor = entry.get("after-requests", 1), entry.get("code", 0), entry.get("factor", 10.0)
    for key, number in (("after-requests", requests), ("at-once", entry.get("at-once", 1))):
        if not _whole(number, 1):
            raise FaultError(f"{where} {key}: a number from 1 is wanted, found {number!r}")
    if not _whole(code, 0) or code > 255:
        raise FaultError(f"{where} code: 0 to 255 is wanted, found {code!r}")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
        raise FaultError(f"{where} factor: a number above 0 is wanted, found {factor!r}")
    return Fault(
        kind=kind,
        launches=tuple(launches),
        at=at,
        after_requests=requests,
        after=None if after is None else read_duration(after),
        bytes=None if size is None else read_size(size),
        seconds=None if seconds is None else read_duration(seconds),
        factor=float(factor),
        code=code,
        counted="after-requests" in entry,
        at_once=entry.get("at-once"),
    )


def read_faults(text: str, where: str = VARIABLE) -> tuple[Fault, ...]:
    """Faults of the one-line form; raises `FaultError`."""
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        kind, *settings = entry.split()
        table: dict[str, object] = {"kind": kind}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise FaultError(f"{where} {setting!r}: key=value is wanted")
            table[key] = _plain(key, value)
        faults.append(fault_from(table, f"{where} {entry!r}:"))
    return tuple(faults)


def _plain(key: str, value: str) -> object:
    if key == "launch":
        return [int(part) if part.isdecimal() else part for part in value.split(",")]
    if key in ("after-requests", "at-once", "code"):
        return int(value) if value.isdecimal() else value
    if key == "factor":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
