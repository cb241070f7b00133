"""From the evidence of a launch to its `Diagnosis`: one first cause, its numbers, and what to do.

Order (facts of vLLM 0.6-0.33): a named cause; else what died; else, where something failed, a defect of the engine if a
traceback of its own says so, and ``unknown`` with the first error lines if not; else the exit; else the load; else
nothing is wrong. What stands beside the text may change the verdict: `supervisord_vllm.engine.circumstance`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING

from supervisord_vllm.core.diagnosis import Action, Change, Diagnosis, Evidence, Kind, Number
from supervisord_vllm.core.ledger import gib, to_bytes
from supervisord_vllm.engine.bounds import FORMULAS, bound
from supervisord_vllm.engine.defect import defect
from supervisord_vllm.engine.lines import Line
from supervisord_vllm.engine.signature import Cure, Outcome

if TYPE_CHECKING:
    from supervisord_vllm.core.facts import Phase

EVIDENCE_TEXT = 600
"""Characters of a line that are kept as evidence."""
_BUSY = (Kind.GPU_BUSY_FOREIGN, Kind.GPU_BUSY_ORPHAN, Kind.GPU_BUSY_UMA)
_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_ARGPARSE_EXIT = 2


def evidence(line: Line) -> Evidence:
    """A line as evidence: bounded, without control characters."""
    return Evidence(line.number, line.process or line.role, _CONTROL.sub("?", line.text.strip())[:EVIDENCE_TEXT])


@dataclass(frozen=True)
class Finding:
    """One candidate: the line, its numbers and the verdict that it leads to (``None`` until the stage is known)."""

    line: Line
    outcome: Outcome | None
    numbers: dict[str, Number]
    phase: Phase
    frames: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Record:
    """What is known of a launch when the verdict falls."""

    cause: Finding | None = None
    symptom: Finding | None = None
    errors: tuple[Evidence, ...] = ()
    frames: tuple[str, ...] = ()
    marker: Evidence | None = None
    failed: bool = False
    serving: bool = False
    stopping: bool = False
    ledger: Mapping[str, Number] = field(default_factory=dict)
    load: tuple[Outcome, dict[str, Number], Evidence] | None = None
    last_load: Mapping[str, Number] = field(default_factory=dict)
    dead: Evidence | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    expected_stop: bool = False

    @property
    def exited(self) -> bool:
        """The engine ended although nobody of ours asked it to."""
        return not self.expected_stop and (self.exit_code is not None or self.exit_signal is not None)


def judge(record: Record) -> Diagnosis:
    """The verdict."""
    when = "runtime" if record.serving else "startup"
    if record.cause is not None:
        return _found(record, record.cause, when)
    if record.symptom is not None:
        return _found(record, record.symptom, when)
    if record.failed or (record.exited and not record.serving and record.errors):
        return _unexplained(record, when)
    if record.exited:
        return _exit_alone(record, when)
    if record.load is not None:
        outcome, numbers, line = record.load
        return diagnosis(outcome, numbers, {}, (line,), "runtime")
    return Diagnosis(
        Kind.NONE,
        "shutdown" if record.stopping or record.expected_stop else when,
        Action.NO_ACTION,
        numbers={**record.ledger, **record.last_load},
        confidence=0.9 if record.serving else 0.6,
        summary="Nothing in this log says that the engine failed.",
        signature="none",
    )


def _found(record: Record, finding: Finding, when: str) -> Diagnosis:
    lines = (evidence(finding.line), *((record.marker,) if record.marker is not None else ()))
    numbers = dict(finding.numbers)
    if record.exit_code is not None and "exit_code" not in numbers and finding is record.symptom:
        numbers["exit_code"] = record.exit_code
    if finding.outcome is None:
        raise ValueError("a finding without an outcome cannot be judged")
    if finding.line.rank is not None:
        numbers["rank"] = finding.line.rank
    return diagnosis(finding.outcome, numbers, record.ledger, lines[: 1 if lines[0] == lines[-1] else 2], when)


def _unexplained(record: Record, when: str) -> Diagnosis:
    """Something failed and no message names it: a Python error of the engine's own, its server's last word, or
    unknown."""
    if record.errors:
        outcome = defect(record.errors[0].text, record.frames, serving=record.serving)
        if outcome is not None:
            lines = (record.errors[0], *((record.marker,) if record.marker is not None else ()))
            return diagnosis(outcome, _exit_numbers(record), {}, lines, when)
    elif record.dead is not None and record.marker is None:
        outcome = Outcome(
            id="engine-dead-says-server",
            kind=Kind.ENGINE_DEAD,
            action=Action.RESTART_SAME,
            summary=("The server says that its engine is dead; the engine's own output does not say why.",),
            advice=("Start again with the same flags; look for an OOM kill in `dmesg` or the cgroup's memory.events.",),
            confidence=0.6,
        )
        return diagnosis(outcome, _exit_numbers(record), {}, (record.dead,), when)
    return _unknown(record, when)


def _unknown(record: Record, when: str) -> Diagnosis:
    if record.exit_code == _ARGPARSE_EXIT and not record.serving:
        outcome = Outcome(
            id="exit-argparse",
            kind=Kind.BAD_CONFIG,
            action=Action.STOP_EXPLAIN,
            summary=("vLLM ended with status 2, which is how it refuses its command line.",),
            advice=("Correct the flag that vLLM names.",),
            confidence=0.7,
        )
        return diagnosis(outcome, {"exit_code": _ARGPARSE_EXIT}, {}, record.errors, when)
    first = record.errors[0].text if record.errors else (record.marker.text if record.marker is not None else "")
    lines = record.errors or ((record.marker,) if record.marker is not None else ())
    return Diagnosis(
        Kind.UNKNOWN,
        when,
        Action.RESTART_SAME,
        numbers=_exit_numbers(record),
        confidence=0.3,
        evidence=lines,
        summary=f"The engine failed and no known message explains it: {first[:200]}"
        if first
        else "The engine failed without a word.",
        advice="Start again once with the same flags; if it fails again, the lines above are what to search for.",
        signature="unknown:" + " ".join(_DIGITS.sub("#", first).split())[:160],
    )


def _exit_alone(record: Record, when: str) -> Diagnosis:
    """An unasked exit that no line explains. Exit 0 after serving is how vLLM ends after its engine died."""
    if record.exit_code not in (None, 0) and not record.serving and (record.exit_code or 0) < 128:
        return _unknown(record, when)
    how = f"signal {record.exit_signal}" if record.exit_signal is not None else f"status {record.exit_code}"
    outcome = Outcome(
        id="exit-unexplained",
        kind=Kind.ENGINE_DEAD,
        action=Action.RESTART_SAME,
        summary=(f"vLLM ended ({how}) although nobody asked it to, and its output does not say why.",),
        advice=("Start again with the same flags; look for an OOM kill in `dmesg` or the cgroup's memory.events.",),
        confidence=0.6,
    )
    return diagnosis(outcome, _exit_numbers(record), {}, (), when)


def _exit_numbers(record: Record) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    if record.exit_code is not None:
        numbers["exit_code"] = record.exit_code
    if record.exit_signal is not None:
        numbers["signal"] = record.exit_signal
    return numbers


def diagnosis(
    outcome: Outcome,
    printed: Mapping[str, Number],
    ledger: Mapping[str, Number],
    lines: Iterable[Evidence],
    when: str,
) -> Diagnosis:
    """The verdict of an outcome: its levers with their values, its sentences with their numbers."""
    numbers = {name: ledger[name] for name in outcome.context if name in ledger} | dict(printed)
    known = known_numbers(numbers, ledger)
    if "shortfall_gib" in known and outcome.kind in _BUSY:
        numbers["shortfall_gib"] = known["shortfall_gib"]
    changes = tuple(_change(cure, known) for cure in outcome.cures)
    return Diagnosis(
        kind=outcome.kind,
        phase=when,
        action=outcome.action,
        change=changes,
        target=outcome.target,
        numbers=numbers,
        confidence=outcome.confidence,
        evidence=tuple(lines),
        summary=render(outcome.summary, known),
        advice=render(outcome.advice, known),
        signature=outcome.id,
    )


def known_numbers(numbers: Mapping[str, Number], ledger: Mapping[str, Number]) -> dict[str, Number]:
    """The printed numbers over the launch's account, with what follows from them: shortfalls, and the values that the
    formulas of `supervisord_vllm.engine.bounds` imply. The account's free memory is of another moment and left out.
    """
    known = _derived({**{name: value for name, value in ledger.items() if name != "free_gib"}, **numbers})
    for formula in FORMULAS:
        value = bound(formula, known)
        if value is not None:
            known[formula] = value
    return known


def _change(cure: Cure, known: Mapping[str, Number]) -> Change:
    if cure.to is None:
        return Change(cure.lever, cure.direction)
    if cure.to.startswith("="):
        return Change(cure.lever, cure.direction, cure.to[1:])
    return Change(cure.lever, cure.direction, bound(cure.to, known))


def _derived(known: dict[str, Number]) -> dict[str, Number]:
    """Numbers that sentences want and messages do not print, two decimals like the ones they come from."""

    def size(name: str) -> float | None:
        value = known.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    requested, free = size("requested_gib"), size("free_gib")
    if requested is not None and free is not None:
        known["shortfall_gib"] = round(requested - free, 2)
    available, needed = size("available_kv_gib"), size("needed_kv_gib")
    if available is not None and available < 0:
        known["kv_deficit_gib"] = -available
    if available and needed:
        known["kv_shortfall_gib"] = round(needed - available, 2)
    return known


def render(templates: Iterable[str], known: Mapping[str, Number]) -> str:
    """The first template whose numbers are all known; empty where none is. The format ``size`` turns GiB into the unit
    that reads best; what is no number is shown as text.
    """
    for template in templates:
        parts = list(Formatter().parse(template))
        if any(name is not None and name not in known for _, name, _, _ in parts):
            continue
        text = []
        for literal, name, spec, _ in parts:
            text.append(literal)
            if name is not None:
                text.append(_shown(known[name], spec or ""))
        return "".join(text)
    return ""


def _shown(value: Number, spec: str) -> str:
    if not isinstance(value, (int, float)):
        return value
    return gib(to_bytes(value)) if spec == "size" else format(value, spec)
