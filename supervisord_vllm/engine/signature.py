"""Signatures: vLLM's messages as data. One signature per message, one file per family in ``signatures/``.

A signature says which line it knows (a literal anchor that pre-filters, and where that is not enough a linear-time
pattern), whose line it must be, what the line is used for, the numbers it prints under their canonical names, and for a
cause the verdict: kind, action, levers, sentence, advice. Adding a message needs no code.

What a line is used for (``use``):

* ``cause``: names what went wrong;
* ``symptom``: says that something died, used when nothing names a cause;
* ``fatal``, ``start-failed``, ``died``, ``raised``, ``dead``: stage markers (engine died in service, engine did not
  start, engine died where the text does not say which, a worker raised, the server says that the engine is dead); they
  carry no kind;
* ``wrapper``: after-shocks and covers that must never be taken for a cause;
* ``stopping``: the server was told to stop, what follows is no cause;
* ``phase``: the start entered a new phase; ``ledger``: numbers of the memory account; ``stats``: the load line;
* ``note``: no verdict by itself, but one that the rules of `supervisord_vllm.engine.circumstance` weigh (how often it
  was seen, and its numbers): a neighbour's process in a pasted ``nvidia-smi``, an exit status in a journal, a
  sixty-second notice.

Whose line (``role``): ``engine`` = engine processes, or untagged and shaped like an exception or an error record;
``startup`` = any process, but only before the engine serves (nothing a client sends can be in the log yet);
``server`` = the API server or untagged; ``any``.

Further keys: ``starts``: the message must begin with one of these (every signature that an INFO record may carry has
them: by them the fast path of `supervisord_vllm.engine.ordinary` knows which INFO records it may pass over);
``frames``: functions of the writer's latest traceback, one of which must be there; ``alone``: counts even where nothing
died; ``beside``: never in an engine's own output, so only believed in files that may hold more than it; ``literals``:
what vLLM's own source must contain for the message to exist (default: the anchor); ``example`` and ``counter``: texts
that must and must not match, both tested.

Raises `SignatureError` for a file that is wrong, naming file, signature and fault; the shipped files are tested.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
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
    "died",
    "dead",
    "wrapper",
    "stopping",
    "phase",
    "ledger",
    "stats",
    "note",
]
Whose = Literal["engine", "startup", "server", "any"]

_VLLM_SOURCE = re.compile(r"(?:^|[ ,;])[\w/]{1,80}\.py\b")
_UNITS = {"bytes": 1 / (1 << 30), "KiB": 1 / (1 << 20), "MiB": 1 / (1 << 10), "GiB": 1.0, "GB": 1.0}
_FRACTIONS = ("_gib", "_s", "util", "concurrency", "kv_usage", "_tps", "_fraction")


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
    pattern_text: str | None
    extract_texts: tuple[str, ...]
    role: Whose
    level: Literal["error", "any"]
    bare: bool
    staged: bool
    phase: str
    seen: str
    source: str
    outcome: Outcome | None
    file: str = ""
    starts: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    alone: bool = False
    beside: bool = False
    literals: tuple[str, ...] = ()
    example: str = ""
    counter: tuple[str, ...] = ()

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """The pattern that must match, compiled when it is first wanted."""
        return None if self.pattern_text is None else _compiled(self.pattern_text)

    @property
    def extract(self) -> tuple[re.Pattern[str], ...]:
        """The patterns that may match."""
        return tuple(_compiled(text) for text in self.extract_texts)

    @property
    def vllms(self) -> bool:
        """Whether vLLM's own Python prints the message, so that its source can be searched for it."""
        return _VLLM_SOURCE.search(self.source) is not None

    def match(self, text: str) -> dict[str, Number] | None:
        """The numbers that the message prints if it is this one, else ``None``. The anchor is known to be in it."""
        numbers: dict[str, Number] = {}
        if self.starts and not text.startswith(self.starts):
            return None
        if self.pattern_text is not None:
            found = _compiled(self.pattern_text).search(text)
            if found is None:
                return None
            numbers.update(_numbers(found))
        for pattern in self.extract_texts:
            found = _compiled(pattern).search(text)
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


_ORDINARY_USES = ("phase", "ledger", "stats", "stopping", "note", "symptom")


@dataclass(frozen=True)
class Catalogue:
    """All signatures, grouped by anchor for the pre-filter, and the stages in order."""

    signatures: tuple[Signature, ...]
    stages: tuple[Stage, ...]
    by_anchor: tuple[tuple[str, tuple[Signature, ...]], ...]

    def anchored(self, text: str) -> list[tuple[Signature, ...]]:
        """The signatures whose anchor occurs: the pre-filter that spares most lines everything else."""
        return [group for anchor, group in self.by_anchor if anchor in text]

    def matches(
        self, text: str, anchored: list[tuple[Signature, ...]] | None = None
    ) -> list[tuple[Signature, dict[str, Number]]]:
        """Every signature whose message this is, with its numbers; the surest, then the longest anchor, first.
        ``anchored``: what `anchored` said of the line that the text is a part of.
        """
        found = []
        for group in self.anchored(text) if anchored is None else anchored:
            if group[0].anchor not in text:
                continue
            for signature in group:
                numbers = signature.match(text)
                if numbers is not None:
                    found.append((signature, numbers))
        if len(found) > 1:
            found.sort(key=lambda hit: (-(hit[0].outcome.confidence if hit[0].outcome else 0), -len(hit[0].anchor)))
        return found

    @property
    def told_at_info(self) -> tuple[str, ...]:
        """How the messages begin that count although their record is an INFO or DEBUG one."""
        return tuple(
            sorted(
                {start for s in self.signatures if s.level == "any" and s.use in _ORDINARY_USES for start in s.starts}
            )
        )


@cache  # bounded by the number of signatures
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


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


VERIFIED = ("0.6.0", "0.33.0")
"""The first and the last release of vLLM whose source was read for the signatures (30 releases in between)."""


def verified_range() -> tuple[str, str]:
    """The releases of vLLM that the signatures were checked against, the first and the last."""
    return VERIFIED


def release(version: str) -> tuple[int, ...]:
    """``0.26.1rc1.dev77+cu130`` → ``(0, 26, 1)``; empty for what is no version."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})", version)
    return tuple(int(part) for part in match[1].split(".")) if match is not None else ()


def outside_verified(version: str) -> str | None:
    """One sentence for an operator whose engine is of another release than those; ``None`` where it is one of them, or
    where it cannot be told. A later patch of the last release counts as verified.
    """
    now, (first, last) = release(version), VERIFIED
    if not now or (release(first) <= now and now[:2] <= release(last)[:2]):
        return None
    return (
        f"vLLM {version} is outside of the releases whose messages were verified ({first} to {last}): an "
        f"unknown message "
        "is told as unknown and changes no configuration; `vllm-supervise signatures verify` says what it no "
        "longer prints."
    )


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The shipped signatures, compiled once per process."""
    folder = resources.files("supervisord_vllm.engine") / "signatures"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name)
    return compile_catalogue(((entry.name, entry.read_text("utf-8")) for entry in files), trusted=True)


def compile_catalogue(files: Iterable[tuple[str, str]], *, trusted: bool = False) -> Catalogue:
    """Signatures from the texts of their files; ``(name, text)`` pairs. The patterns of ``trusted`` files (the shipped
    ones, which the tests compile) are compiled when they are first wanted.
    """
    signatures: list[Signature] = []
    stages: list[Stage] = []
    for name, text in files:
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SignatureError(f"{name}: {error}") from error
        for entry in data.get("signature", ()):
            entry.setdefault("file", name)
        signatures += [_checked(name, entry, _signature) for entry in data.get("signature", ())]
        stages += [_checked(name, entry, _stage) for entry in data.get("stage", ())]
    if not trusted:
        for signature in signatures:
            _checked(signature.file, {"id": signature.id}, lambda _, s=signature: (s.pattern, s.extract))
    ids = [s.id for s in signatures] + [s.outcome.id for s in stages]
    if len(set(ids)) < len(ids):
        twice = next(identity for identity in ids if ids.count(identity) > 1)
        raise SignatureError(f"signature id {twice!r} is used twice")
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
        pattern_text=entry.get("pattern"),
        extract_texts=tuple(entry.get("extract", ())),
        role=role,
        level=entry.get("level", "error"),
        bare=bool(entry.get("bare", False)),
        staged=staged,
        phase=entry.get("phase", ""),
        seen=entry.get("seen", ""),
        source=entry.get("source", ""),
        outcome=_outcome(entry) if use in ("cause", "symptom") and not staged else None,
        file=entry["file"],
        starts=tuple(entry.get("starts", ())),
        frames=tuple(entry.get("frames", ())),
        alone=bool(entry.get("alone", False)),
        beside=bool(entry.get("beside", False)),
        literals=tuple(entry.get("literals", (entry["anchor"],))),
        example=entry.get("example", ""),
        counter=tuple(entry.get("counter", ())),
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
