"""Signatures: vLLM's messages as data. One signature per message, one file per family in ``signatures/``.

A signature says which line it knows (a literal anchor that pre-filters, and where that is not enough a linear-time
pattern), whose line it must be, what the line is used for, the numbers it prints under their canonical names, and for a
cause the verdict: kind, action, levers, sentence, advice. Adding a message needs no code.

What a line is used for (``use``):

* ``cause``: names what went wrong;
* ``symptom``: says that something died, used when nothing names a cause;
* ``fatal``, ``start-failed``, ``raised``, ``dead``: stage markers (engine died in service, engine did not start, a
  worker raised, the server says that the engine is dead); they carry no kind;
* ``wrapper``: after-shocks and covers that must never be taken for a cause;
* ``stopping``: the server was told to stop, what follows is no cause;
* ``phase``: the start entered a new phase; ``ledger``: numbers of the memory account; ``stats``: the load line.

Whose line (``role``): ``engine`` = engine processes, or untagged and shaped like an exception or an error record;
``startup`` = any process, but only before the engine serves (nothing a client sends can be in the log yet);
``server`` = the API server or untagged; ``any``.

Raises `SignatureError` for a file that is wrong, naming file, signature and fault; the shipped files are tested.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, cast, get_args

from supervisord_vllm.core.diagnosis import Action, Direction, Kind, Number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Use = Literal[
    "cause",
    "symptom",
    "fatal",
    "start-failed",
    "raised",
    "dead",
    "wrapper",
    "stopping",
    "phase",
    "ledger",
    "stats",
]
Whose = Literal["engine", "startup", "server", "any"]

_UNITS = {"bytes": 1 / (1 << 30), "KiB": 1 / (1 << 20), "MiB": 1 / (1 << 10), "GiB": 1.0, "GB": 1.0}
_FRACTIONS = ("_gib", "_s", "util", "concurrency", "kv_usage", "_tps")


class SignatureError(ValueError):
    """A signature file is wrong; the message names the file and the signature."""


@dataclass(frozen=True, slots=True)
class Cure:
    """One lever of a verdict. ``to`` names a number of the message or a formula of `supervisord_vllm.engine.bounds`;
    behind ``=`` it is the value itself.
    """

    lever: str
    direction: Direction
    to: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict that a cause leads to. ``summary`` and ``advice`` are templates, the best first: the first one whose
    numbers are all known is used. ``context`` names ledger numbers that belong into the diagnosis.
    """

    id: str
    kind: Kind
    action: Action
    cures: tuple[Cure, ...] = ()
    target: str | None = None
    summary: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    confidence: float = 0.5
    context: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """One message. ``staged`` marks an out-of-memory text whose verdict depends on the stage (see `Stage`)."""

    id: str
    use: Use
    anchor: str
    pattern: re.Pattern[str] | None
    extract: tuple[re.Pattern[str], ...]
    role: Whose
    level: Literal["error", "any"]
    bare: bool
    staged: bool
    phase: str
    seen: str
    source: str
    outcome: Outcome | None

    def match(self, text: str) -> dict[str, Number] | None:
        """The numbers that the message prints if it is this one, else ``None``. The anchor is known to be in it."""
        numbers: dict[str, Number] = {}
        if self.pattern is not None:
            found = self.pattern.search(text)
            if found is None:
                return None
            numbers.update(_numbers(found))
        for pattern in self.extract:
            found = pattern.search(text)
            if found is not None:
                numbers.update(_numbers(found))
        return numbers


@dataclass(frozen=True, slots=True)
class Stage:
    """Where an out-of-memory error happened: any of ``frames`` in its traceback (and all of ``within``), else one of
    the ``phases`` that the start had reached. ``when`` is startup or runtime. The first stage that fits is it.
    """

    when: Literal["startup", "runtime"]
    frames: tuple[str, ...]
    within: tuple[str, ...]
    phases: tuple[str, ...]
    outcome: Outcome


@dataclass(frozen=True)
class Catalogue:
    """All signatures, grouped by anchor for the pre-filter, and the stages in order."""

    signatures: tuple[Signature, ...]
    stages: tuple[Stage, ...]
    by_anchor: tuple[tuple[str, tuple[Signature, ...]], ...]

    def matches(self, text: str) -> list[tuple[Signature, dict[str, Number]]]:
        """Every signature whose message this is, with its numbers; the surest, then the longest anchor, first."""
        found = []
        for anchor, group in self.by_anchor:
            if anchor in text:
                for signature in group:
                    numbers = signature.match(text)
                    if numbers is not None:
                        found.append((signature, numbers))
        found.sort(key=lambda hit: (-(hit[0].outcome.confidence if hit[0].outcome else 0), -len(hit[0].anchor)))
        return found

    def hints(self, text: str) -> bool:
        """Whether any anchor occurs: the pre-filter that spares most lines everything else."""
        return any(anchor in text for anchor, _ in self.by_anchor)


def _numbers(match: re.Match[str]) -> dict[str, Number]:
    return {name: number(name, value) for name, value in match.groupdict().items() if value is not None}


def number(name: str, printed: str) -> Number:
    """A printed value under its canonical name: sizes with a unit become GiB (four decimals), commas are dropped; what
    is no number stays text.
    """
    value, _, unit = printed.strip().partition(" ")
    try:
        if name.endswith("_gib"):
            scaled = float(value) * _UNITS.get(unit, 1.0)
            return round(scaled, 4) if unit else scaled
        if name.endswith("_pct"):
            return float(value)
        if name.endswith(_FRACTIONS):
            return float(value.replace(",", ""))
        return int(float(value.replace(",", "")))
    except (ValueError, OverflowError):
        return printed


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The shipped signatures, compiled once per process."""
    folder = resources.files("supervisord_vllm.engine") / "signatures"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name)
    return compile_catalogue((entry.name, entry.read_text("utf-8")) for entry in files)


def compile_catalogue(files: Iterable[tuple[str, str]]) -> Catalogue:
    """Signatures from the texts of their files; ``(name, text)`` pairs."""
    signatures: list[Signature] = []
    stages: list[Stage] = []
    for name, text in files:
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SignatureError(f"{name}: {error}") from error
        signatures += [_checked(name, entry, _signature) for entry in data.get("signature", ())]
        stages += [_checked(name, entry, _stage) for entry in data.get("stage", ())]
    ids = [s.id for s in signatures] + [s.outcome.id for s in stages]
    for identity in ids:
        if ids.count(identity) > 1:
            raise SignatureError(f"signature id {identity!r} is used twice")
    groups: dict[str, list[Signature]] = {}
    for signature in signatures:
        groups.setdefault(signature.anchor, []).append(signature)
    return Catalogue(
        tuple(signatures), tuple(stages), tuple((anchor, tuple(group)) for anchor, group in groups.items())
    )


def _checked(file: str, entry: Mapping[str, Any], make: Any) -> Any:  # noqa: ANN401 - one error text for both tables
    try:
        return make(entry)
    except (KeyError, ValueError, TypeError, re.error) as error:
        raise SignatureError(f"{file}: signature {entry.get('id', '?')!r}: {error!r}") from error


def _signature(entry: Mapping[str, Any]) -> Signature:
    use = cast("Use", entry["use"])
    if use not in get_args(Use):
        raise ValueError(f"use {use!r} is none of {get_args(Use)}")
    role = cast("Whose", entry.get("role", "engine"))
    if role not in get_args(Whose):
        raise ValueError(f"role {role!r} is none of {get_args(Whose)}")
    staged = bool(entry.get("staged", False))
    if not entry["anchor"]:
        raise ValueError("the anchor is empty")
    return Signature(
        id=entry["id"],
        use=use,
        anchor=entry["anchor"],
        pattern=re.compile(entry["pattern"]) if "pattern" in entry else None,
        extract=tuple(re.compile(pattern) for pattern in entry.get("extract", ())),
        role=role,
        level=entry.get("level", "error"),
        bare=bool(entry.get("bare", False)),
        staged=staged,
        phase=entry.get("phase", ""),
        seen=entry.get("seen", ""),
        source=entry.get("source", ""),
        outcome=_outcome(entry) if use in ("cause", "symptom") and not staged else None,
    )


def _stage(entry: Mapping[str, Any]) -> Stage:
    if entry["when"] not in ("startup", "runtime"):
        raise ValueError(f"when {entry['when']!r} is neither startup nor runtime")
    return Stage(
        when=entry["when"],
        frames=tuple(entry.get("frames", ())),
        within=tuple(entry.get("within", ())),
        phases=tuple(entry.get("phases", ())),
        outcome=_outcome(entry),
    )


def _outcome(entry: Mapping[str, Any]) -> Outcome:
    cures = tuple(Cure(cure["lever"], cure["direction"], cure.get("to")) for cure in entry.get("change", ()))
    for cure in cures:
        if cure.direction not in get_args(Direction):
            raise ValueError(f"direction {cure.direction!r} is none of {get_args(Direction)}")
    confidence = float(entry["confidence"])
    if not 0 < confidence <= 1:
        raise ValueError(f"confidence {confidence} is not within 0 and 1")
    return Outcome(
        id=entry["id"],
        kind=Kind(entry["kind"]),
        action=Action(entry["action"]),
        cures=cures,
        target=entry.get("target"),
        summary=tuple(entry["summary"]),
        advice=tuple(entry["advice"]),
        confidence=confidence,
        context=tuple(entry.get("context", ())),
    )
